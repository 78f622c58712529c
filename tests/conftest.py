import pytest
import torch
from hypothesis import HealthCheck, settings

from helpers import BACKENDS

# Compiling a kernel at its first use is no reason to fail; examples are drawn the same way every time.
settings.register_profile(
    "lodo", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lodo")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; of the session, because hypothesis does not renew a test's own fixtures."""
    return str(request.param)
