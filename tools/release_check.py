"""Build the wheel and the sdist, install each into a clean environment and try it: ``make release-check``.

The environments get the dependencies pinned in ``constraints.txt`` and nothing from this folder.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    "py.typed",
    "lab/settings/paper.toml",
    "lab/page/page.js",
    "lab/settings/rivals.toml",
    "lab/settings/spaces.toml",
    "lab/settings/durations.toml",
    "lab/optimizers/l2l.weights",
)
SMOKE = """
import torch, lodo
from importlib.resources import files
assert lodo.__version__ == VERSION, lodo.__version__
assert "site-packages" in lodo.__file__, lodo.__file__
assert files("lodo").joinpath("py.typed").is_file()
x = torch.nn.Parameter(torch.ones(8))
opt = lodo.LODO([x], lr=0.1)
for _ in range(20):
    opt.zero_grad()
    x.square().sum().backward()
    opt.step()
assert x.abs().max() < 0.5
"""


def main() -> None:
    """Build the packages, look inside, install them and try them."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory(prefix="lodo-release-") as scratch:
        say("building")
        run(sys.executable, "-m", "build", "--outdir", scratch, str(ROOT))
        [wheel] = Path(scratch).glob("*.whl")
        [sdist] = Path(scratch).glob("*.tar.gz")
        check_contents(wheel, sdist, version)
        say("checking the description of the packages")
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        for package, extra in ((wheel, "lab"), (sdist, None)):
            say(f"installing {package.name} into a clean environment; extra: {extra or 'none'}")
            try_package(package, extra, version, Path(scratch) / package.suffix[1:])
    say("both packages install and work")


def check_contents(wheel: Path, sdist: Path, version: str) -> None:
    """Check the version in the file names, and that files other than Python modules are included."""
    if not (wheel.name.startswith(f"lodo-{version}-") and sdist.name == f"lodo-{version}.tar.gz"):
        raise SystemExit(f"the packages must have version {version}, got {wheel.name} and {sdist.name}")
    inside = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        source = {name.partition("/src/")[2] for name in archive.getnames()}
    for name in NEEDED:
        for where, names in (("wheel", inside), ("sdist", source)):
            if f"lodo/{name}" not in names:
                raise SystemExit(f"the {where} must contain lodo/{name}, but does not")


def try_package(package: Path, extra: str | None, version: str, folder: Path) -> None:
    """Install a package as a user would, outside this folder, and use it."""
    venv.create(folder, with_pip=True)
    bin_folder = folder / ("Scripts" if sys.platform == "win32" else "bin")
    wanted = f"{package}[{extra}]" if extra else str(package)
    run(str(bin_folder / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), wanted)
    run(str(bin_folder / "python"), "-c", SMOKE.replace("VERSION", repr(version)), cwd=folder)
    if extra:
        lodo = str(bin_folder / "lodo")
        compared = ["--optimizers", "lodo, adam", "--steps", "20", "--seeds", "1", "--workers", "0"]
        run(lodo, "compare", "rosenbrock", *compared, cwd=folder)
        run(lodo, "report", "results", cwd=folder)
        if (folder / "report.html").stat().st_size < 1e6:
            raise SystemExit("report.html must contain Plotly, but is too small")


def run(*words: str, cwd: Path | None = None) -> None:
    """Run a command, and show its output if it fails."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:4])} ... failed:\n{done.stdout}\n{done.stderr}")


def say(text: str) -> None:
    """Say what is going on; an installation takes a minute."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
