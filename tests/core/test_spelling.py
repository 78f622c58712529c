"""Configured objects and their short text: the same in arguments, in repr, in checkpoints and in error messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import give_gradients, group_of, parameter
from lodo import LODO, Dense, Diagonal, Mixing, Residual, Scalar, memory_estimate
from lodo.estimate import as_family
from lodo.families import FAMILIES
from lodo.meta import META_OPTIMIZERS, SGD, Adam, ScheduleFree
from lodo.recipes import as_meta_optimizer
from lodo.spelling import parse_calls, parse_options, spell

POSITIVE = st.floats(0.0, 1e30, exclude_min=True)
BELOW_ONE = st.floats(0.0, 1.0, exclude_max=True)
COUNT, WIDTH = st.integers(1, 10**6), st.floats(1.0, 1e6)
ANY_FAMILY = {
    "mixing": st.builds(Mixing, COUNT, COUNT, WIDTH, st.sampled_from(["random", "shuffle"])),
    "residual": st.builds(Residual, COUNT, WIDTH),
    "diagonal": st.just(Diagonal()),
    "scalar": st.just(Scalar()),
    "dense": st.just(Dense()),
}
ANY_META_OPTIMIZER = {
    "adam": st.builds(Adam, st.tuples(BELOW_ONE, BELOW_ONE), POSITIVE, st.sampled_from([None, "bfloat16"])),
    "sgd": st.just(SGD()),
    "schedule-free": st.builds(ScheduleFree, BELOW_ONE, st.none() | COUNT, POSITIVE),
}
SHORT = [
    (Mixing(), "mixing"),
    (Mixing(depth=16), "mixing"),
    (Mixing(depth=8), "mixing(depth=8)"),
    (Mixing(8, 2, 3, "shuffle"), "mixing(depth=8, block_size=2, width=3.0, mixing='shuffle')"),
    (Residual(), "residual"),
    (Residual(width=1.5), "residual(width=1.5)"),
    (Diagonal(), "diagonal"),
    (Scalar(), "scalar"),
    (Dense(), "dense"),
    (Adam(), "adam"),
    (Adam(betas=(0.8, 0.99), eps=1e-6), "adam(betas=(0.8, 0.99), eps=1e-06)"),
    (Adam(moment_dtype=torch.bfloat16), "adam(moment_dtype='bfloat16')"),
    (SGD(), "sgd"),
    (ScheduleFree(), "schedule-free"),
    (ScheduleFree(window=100), "schedule-free(window=100)"),
    (ScheduleFree(b=0.5, eps=1e-9), "schedule-free(b=0.5, eps=1e-09)"),
]


def object_of(text):
    """What a text spells, whichever of the two kinds it is."""
    return (as_family if text.split("(")[0] in FAMILIES else as_meta_optimizer)(text)


def test_every_kind_is_in_the_table():
    assert ANY_FAMILY.keys() == FAMILIES.keys()
    assert ANY_META_OPTIMIZER.keys() == META_OPTIMIZERS.keys()
    assert {type(thing) for thing, _ in SHORT} == {*FAMILIES.values(), *META_OPTIMIZERS.values()}


@pytest.mark.parametrize(("thing", "text"), SHORT, ids=[text for _, text in SHORT])
def test_the_text_has_only_what_differs_from_the_defaults(thing, text):
    assert repr(thing) == str(thing) == text
    assert object_of(text) == thing


@given(st.one_of(*ANY_FAMILY.values(), *ANY_META_OPTIMIZER.values()))
def test_there_and_back(thing):
    again = object_of(repr(thing))
    assert again == thing
    assert type(again) is type(thing)
    assert repr(again) == repr(thing)
    assert hash(again) == hash(thing)


@given(st.one_of(*ANY_FAMILY.values()), st.one_of(*ANY_META_OPTIMIZER.values()))
def test_objects_are_taken_as_they_are(family, meta):
    assert as_family(family) is family
    assert as_meta_optimizer(meta) is meta


@pytest.mark.parametrize(
    "text",
    [
        "Mixing(depth=8)",
        "MIXING(depth=8)",
        "  mixing ( depth = 8 )\n",
        "mixing(\n  depth=8,\n)",
        "mixing(width=2, depth=8)",
    ],
)
def test_case_and_blanks_do_not_matter(text):
    assert as_family(text) == Mixing(depth=8)


def test_a_name_alone_may_have_brackets():
    assert as_family("diagonal()") == Diagonal()
    assert as_meta_optimizer("Schedule-Free()") == ScheduleFree()


# ---------------------------------------------------------------- one text everywhere


@pytest.mark.parametrize("family", [Mixing(3, 2, mixing="shuffle"), Mixing(3), Residual(4), Diagonal()], ids=str)
@pytest.mark.parametrize("meta", [Adam((0.5, 0.9), moment_dtype="bfloat16"), SGD(), ScheduleFree(window=3)], ids=str)
def test_the_same_text_in_repr_in_the_state_and_as_an_argument(family, meta):
    x = parameter(6)
    opt = LODO([x], lr=0.01, preconditioner=family, meta_optimizer=meta, backend="reference")  # nothing to compile
    give_gradients([x])
    opt.step()
    shown, saved = repr(opt), opt.state_dict()
    group = saved["param_groups"][0]
    assert (group["preconditioner"], group["meta_optimizer"]) == (repr(family), repr(meta))
    assert f"preconditioner: {family}\n" in shown
    assert f"meta_optimizer: {meta}\n" in shown
    assert f"network 0: n = 6, {family}, memory" in shown
    options = {name: group[name] for name in ("preconditioner", "meta_optimizer")}
    again = LODO([parameter(6)], lr=0.01, **options)
    assert group_of(again).family == family
    again.load_state_dict(saved)  # the same network: nothing is refused
    assert again.state_dict()["param_groups"] == saved["param_groups"]
    of_a_group = LODO([{"params": [parameter(6)], **options}], lr=0.01)
    assert of_a_group.param_groups[0]["preconditioner"] == repr(family)
    assert memory_estimate(6, **options) == memory_estimate(6, family, meta_optimizer=meta)


def test_a_longer_text_is_shortened():
    text = "Mixing(depth=16, block_size=4, width=2.0, mixing='shuffle')"
    opt = LODO([parameter(3)], preconditioner=text, meta_optimizer="adam(eps=1e-7)")
    assert opt.param_groups[0]["preconditioner"] == "mixing(mixing='shuffle')"
    assert opt.param_groups[0]["meta_optimizer"] == "adam"


# ---------------------------------------------------------------- errors


NAMES = "'mixing', 'residual', 'diagonal', 'scalar', 'dense'"
NO_FAMILY = [
    ("diag", f"preconditioner must be one of {NAMES}, got 'diag'"),
    ("mixng", f"preconditioner must be one of {NAMES}, got 'mixng'; did you mean 'mixing'?"),
    ("Mixng(depth=8)", f"preconditioner must be one of {NAMES}, got 'Mixng(depth=8)'; did you mean 'mixing'?"),
    ("nothing at all", "preconditioner must be a name, or a call with named options such as 'mixing(depth=16)', got"),
    ("", "preconditioner must be a name, or a call with named options such as 'mixing(depth=16)', got ''"),
    (8, f"preconditioner must be one of {NAMES}, text such as 'mixing(...)', or an instance of Preconditioner, got 8"),
    (Mixing, "or an instance of Preconditioner, got <class"),
    (Adam(), "or an instance of Preconditioner, got adam"),
    (
        "mixing(dept=8)",
        "preconditioner: mixing has the options depth, block_size, width, mixing, got 'dept' in 'mixing(dept=8)'; "
        "did you mean 'depth'?",
    ),
    ("diagonal(depth=8)", "preconditioner: diagonal has no options, got 'depth' in 'diagonal(depth=8)'"),
    ("mixing(8)", "call with named options such as 'mixing(depth=16)', got 'mixing(8)'"),
    ("mixing(**{'depth': 8})", "call with named options such as 'mixing(depth=16)', got"),
    ("mixing(depth=8", "call with named options such as 'mixing(depth=16)', got 'mixing(depth=8'"),
    ("mixing(depth=)", "call with named options such as 'mixing(depth=16)', got 'mixing(depth=)'"),
    ("mixing(depth=8)(depth=9)", "call with named options such as 'mixing(depth=16)', got 'mixing(depth=8)(depth=9)'"),
    ("mixing(depth=8), dense()", "call with named options such as 'mixing(depth=16)', got 'mixing(depth=8), dense()'"),
    ("mixing(depth=8, depth=9)", "preconditioner: depth of mixing must be given once, got 'mixing(depth=8, depth=9)'"),
    ("mixing(depth=deep)", "preconditioner: depth of mixing must be a finite number, text, True, False, None or a"),
    ("mixing(width=1e999)", "preconditioner: width of mixing must be a finite number, text, True, False, None or a"),
    ("mixing(depth=0)", "depth must be an integer >= 1, got 0"),
    ("mixing(depth=2.5)", "depth must be an integer >= 1, got 2.5"),
    ("mixing(depth=True)", "depth must be an integer >= 1, got True"),
    ("mixing(block_size=0)", "block_size must be an integer >= 1, got 0"),
    ("mixing(width=0.5)", "width must be a finite number in [1.0, inf), got 0.5"),
    ("residual(width='wide')", "width must be a finite number in [1.0, inf), got 'wide'"),
    ("residual(depth=0)", "depth must be an integer >= 1, got 0"),
    ("mixing(mixing='riffle')", "mixing must be one of 'random', 'shuffle', got 'riffle'"),
    ("mixing(mixing='shufle')", "mixing must be one of 'random', 'shuffle', got 'shufle'; did you mean 'shuffle'?"),
    ("mixing(mixing='permuted-shuffle')", "mixing must be one of 'random', 'shuffle', got 'permuted-shuffle'"),
]
METAS = "'adam', 'sgd', 'schedule-free'"
CALL = "meta_optimizer must be a name, or a call with named options such as 'adam(betas=(0.9, 0.999))', got "
DTYPES = "moment_dtype must be 'bfloat16' or torch.bfloat16, or None for theta's dtype, got "
NO_META_OPTIMIZER = [
    ("adamw", f"meta_optimizer must be one of {METAS}, got 'adamw'; did you mean 'adam'?"),
    ("schedulefree", f"meta_optimizer must be one of {METAS}, got 'schedulefree'; did you mean 'schedule-free'?"),
    ("lion", f"meta_optimizer must be one of {METAS}, got 'lion'"),
    (0.9, f"meta_optimizer must be one of {METAS}, text such as 'adam(...)', or an instance of MetaOptimizer, got 0.9"),
    (Diagonal(), "or an instance of MetaOptimizer, got diagonal"),
    ("sgd(lr=0.1)", "meta_optimizer: sgd has no options, got 'lr' in 'sgd(lr=0.1)'"),
    (
        "adam(beta=(0.9, 0.99))",
        "meta_optimizer: adam has the options betas, eps, moment_dtype, got 'beta' in 'adam(beta=(0.9, 0.99))'; "
        "did you mean 'betas'?",
    ),
    ("adam(0.9)", CALL + "'adam(0.9)'"),
    ("adam(eps=1e-6, eps=1e-7)", "meta_optimizer: eps of adam must be given once"),
    ("adam(betas=0.9)", "betas must be two numbers in [0.0, 1.0), got 0.9"),
    ("adam(betas=(0.9,))", "betas must be two numbers in [0.0, 1.0), got (0.9,)"),
    ("adam(betas=(0.9, 1.0))", "betas[1] must be a finite number in [0.0, 1.0), got 1.0"),
    ("adam(eps=0.0)", "eps must be a finite number in (0.0, inf), got 0.0"),
    ("adam(moment_dtype='float8')", DTYPES + "'float8'"),
    ("adam(moment_dtype='own')", DTYPES + "'own'"),
    ("adam(moment_dtype=[16])", DTYPES + "[16]"),
    ("schedule-free(window=0)", "window must be an integer >= 1, got 0"),
    ("schedule-free(window=2.5)", "window must be an integer >= 1, got 2.5"),
    ("schedule-free(window=True)", "window must be an integer >= 1, got True"),
    ("schedule-free(b=1.0)", "b must be a finite number in [0.0, 1.0), got 1.0"),
    ("schedule-free(windw=5)", "got 'windw' in 'schedule-free(windw=5)'; did you mean 'window'?"),
    ("schedule-free(moment_dtype='bfloat16')", "schedule-free has the options b, window, eps, got 'moment_dtype'"),
]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [*(("preconditioner", *case) for case in NO_FAMILY), *(("meta_optimizer", *case) for case in NO_META_OPTIMIZER)],
)
def test_errors_name_the_argument_the_value_and_what_is_allowed(argument, value, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared below
        LODO([parameter(3)], **{argument: value})
    assert message in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_moments_in_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"moment_dtype must be 'bfloat16' or torch.bfloat16, .* got {dtype}"):
        Adam(moment_dtype=dtype)


@pytest.mark.parametrize(
    ("argument", "value", "meant"),
    [
        ("recipe", "robst", "robust"),
        ("momentum", "lerned", "learned"),
        ("backend", "nunba", "numba"),
        ("nonfinite", "skpi", "skip"),
        ("on_reshard", "restrat", "restart"),
        ("preconditioner", "diagnal", "diagonal"),
        ("meta_optimizer", "schedule_free", "schedule-free"),
    ],
)
def test_near_misses_are_understood(argument, value, meant):
    with pytest.raises(ValueError, match=rf"{argument} must be one of .*, got '{value}'; did you mean '{meant}'\?$"):
        LODO([parameter(3)], **{argument: value})


# ---------------------------------------------------------------- calls


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lodo", "torch.AdamW", "mine:Own"]),
            st.dictionaries(st.sampled_from(["lr", "a_b", "x1"]), LITERALS),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_calls_there_and_back(calls):
    """Any name with any literal options, also several at once, as on the command line."""
    assert parse_calls(", ".join(spell(*call) for call in calls)) == calls


def test_options_alone():
    assert parse_options("") == {}
    assert parse_options("n=200, v=(1, 2)") == {"n": 200, "v": (1, 2)}
    for text in ("", " ", "lr=0.1"):
        with pytest.raises((SyntaxError, ValueError)):
            parse_calls(text)
