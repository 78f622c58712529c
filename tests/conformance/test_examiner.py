"""PyTorch's own way of examining an optimizer: an `OptimizerInfo`, put through what torch asks of each of its own.

torch ships the description of optimizers and the machinery (`torch.testing._internal.common_optimizers`), not the tests
that use it; those below ask the same questions, in the same terms. EXCLUDED has the questions that do not apply.
"""

from __future__ import annotations

import copy
import inspect
import io
from unittest import SkipTest

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
    optims,
)
from torch.testing._internal.common_utils import TestCase

from lodo import LODO, KronLODO, Mixing

EXCLUDED = {
    "foreach, fused and differentiable variants agree": "LODO has none of the three flags: groups are flat vectors",
    "peak memory of foreach": "as above; tests/core/test_memory.py bounds LODO's memory",
    "capturable on CUDA graphs": "a step looks at whether the last one was refused, so it cannot be captured",
    "sparse gradients": "refused with an error: the preconditioner mixes all coordinates (asked in test_errors)",
    "state on CUDA for parameters on the CPU": "this machine has no CUDA",
    "fused optimizers under GradScaler": "LODO takes unscaled gradients as most do: test_loops.py",
    "default dtype with foreach": "no foreach; LODO's dtype is that of its parameters",
}


def inputs(device, dtype=None):
    def one(desc, **options):
        return OptimizerInput(
            params=None, kwargs={"preconditioner": Mixing(depth=4), "backend": "reference", **options}, desc=desc
        )

    return [
        OptimizerInput(params=None, kwargs={}, desc="default"),
        OptimizerInput(params=None, kwargs={"lr": 0.05}, desc="default but for the lr"),
        one("non-default lr", lr=0.01),
        one("tensor lr", lr=torch.tensor(0.01)),
        one("no momentum", lr=0.02, beta=0.0),
        one("non-zero weight_decay", lr=0.02, weight_decay=0.1),
        one("maximize", lr=0.02, weight_decay=0.1, maximize=True),
        one("robust", lr=0.02, recipe="robust", preconditioner=Mixing(depth=4, mixing="shuffle")),
        one("schedule-free", lr=0.02, meta_optimizer="schedule-free"),
        one("diagonal", lr=0.02, preconditioner="diagonal"),
    ]


def with_sparse_gradient(device, dtype):
    x = Parameter(torch.zeros(2, device=device, dtype=dtype))
    x.grad = torch.ones_like(x).detach().to_sparse()
    return x


def error(params, desc, regex, kind=ValueError, on=OptimizerErrorEnum.CONSTRUCTION_ERROR, **options):
    given = OptimizerInput(params=params, kwargs=options, desc=desc)
    return ErrorOptimizerInput(given, error_on=on, error_type=kind, error_regex=regex)


def error_inputs(device, dtype):
    x, sparse = Parameter(torch.zeros(2, device=device, dtype=dtype)), with_sparse_gradient(device, dtype)
    return [
        *get_error_inputs_for_all_optims(device, dtype),
        error([x], "negative lr", "lr must be a finite number", lr=-1.0),
        error([x], "beta of 1", "beta must be a finite number", beta=1.0),
        error([x], "unknown family", "preconditioner must be", preconditioner="magic"),
        error([x], "check_sync_every of 0", "check_sync_every must be an integer >= 1, got 0", check_sync_every=0),
        error([x], "unknown on_reshard", "on_reshard must be one of 'raise', 'restart', got 'x'", on_reshard="x"),
        error([sparse], "sparse", "sparse gradients are not supported", RuntimeError, OptimizerErrorEnum.STEP_ERROR),
    ]


def kron_inputs(device, dtype=None):
    def one(desc, **options):
        return OptimizerInput(params=None, kwargs={"lr": 0.02, **options}, desc=desc)

    return [
        OptimizerInput(params=None, kwargs={}, desc="default"),
        one("non-default lr"),
        one("tensor lr", lr=torch.tensor(0.01)),
        one("non-zero weight_decay", weight_decay=0.1),
        one("maximize", weight_decay=0.01, maximize=True),
        one("averaging", averaging=0.9, betas=(0.5, 0.9)),
        one("reference", backend="reference"),
        one("orthogonal", basis="orthogonal"),
        one("Adam", basis="none", gains=False, gate=False, averaging=0),
        one("SOAP", gains=False, gate=False, averaging=0, refresh_every=3),
        one("greedy", anneal=0.0, meta_lr=0.1, gate_lr=0.1),
        one("bfloat16", state_dtype="bfloat16"),
    ]


def kron_error_inputs(device, dtype):
    x, sparse = Parameter(torch.zeros(2, device=device, dtype=dtype)), with_sparse_gradient(device, dtype)
    return [
        *get_error_inputs_for_all_optims(device, dtype),
        error([x], "negative lr", "lr must be a finite number", lr=-1.0),
        error([x], "beta of 1", r"betas\[0\] must be a finite number", betas=(1.0, 0.9)),
        error([x], "unknown basis", "basis must be one of", basis="magic"),
        error([sparse], "sparse", "sparse gradients are not supported", RuntimeError, OptimizerErrorEnum.STEP_ERROR),
    ]


SCHEDULERS = (
    [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
    [lambda opt: ExponentialLR(opt, gamma=0.99), lambda opt: ReduceLROnPlateau(opt)],
    [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4), lambda opt: CosineAnnealingLR(opt, T_max=40)],
)
INFOS = [
    OptimizerInfo(
        kind,
        optim_inputs_func=given,
        optim_error_inputs_func=errors,
        scheduler_inputs=SCHEDULERS,
        supported_impls=(),
        not_og_supported_flags=(),
        supports_sparse=False,
        supports_multiple_devices=several,
    )
    for kind, given, errors, several in (
        (LODO, inputs, error_inputs, False),
        (KronLODO, kron_inputs, kron_error_inputs, True),
    )
]
OF_THE_OPTIMIZER = ("backend", "recipe", "nonfinite")


def made(info: OptimizerInfo, settings: OptimizerInput, params) -> Optimizer:
    return info.optim_cls(params, **copy.deepcopy(settings.kwargs))


def lr_of(info: OptimizerInfo, settings: OptimizerInput) -> float:
    return float(settings.kwargs.get("lr", inspect.signature(info.optim_cls).parameters["lr"].default))


def points(device, dtype) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in ((3, 2), (4,), ())]


def advance(opt: Optimizer, params: list[Parameter], steps: int = 1, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        opt.step()


class TestExaminer(TestCase):
    """What torch asks of its own optimizers."""

    @optims(INFOS, dtypes=[torch.float32])
    def test_errors(self, device, dtype, optim_info):
        for case in optim_info.optim_error_inputs_func(device, dtype):
            given = case.optimizer_error_input
            params = [Parameter(torch.randn(1, device=device))] if given.params is None else given.params
            if case.error_on == OptimizerErrorEnum.STEP_ERROR:
                with self.assertRaisesRegex(case.error_type, case.error_regex):
                    optim_info.optim_cls(params, **given.kwargs).step()
            elif issubclass(case.error_type, Warning):
                with self.assertWarnsRegex(case.error_type, case.error_regex):
                    optim_info.optim_cls(params, **given.kwargs)
            else:
                with self.assertRaisesRegex(case.error_type, case.error_regex):
                    optim_info.optim_cls(params, **given.kwargs)

    @optims(INFOS, dtypes=[torch.float32])
    def test_there_are_no_other_implementations(self, device, dtype, optim_info):
        """None of torch's global flags (foreach, fused, differentiable) multiplies the configurations."""
        found = _get_optim_inputs_including_global_cliquey_kwargs(device, dtype, optim_info)
        self.assertEqual([x.desc for x in found], [x.desc for x in optim_info.optim_inputs_func(device)])

    @optims(INFOS, dtypes=[torch.float32, torch.float64])
    def test_it_goes_the_right_way_with_every_scheduler(self, device, dtype, optim_info):
        """Torch's `test_forloop_goes_right_direction`, in its sizes and steps; also for parameters with gaps."""
        for settings in optim_info.optim_inputs_func(device, dtype):
            for schedulers in ((), *optim_info.scheduler_inputs):
                for gaps in (False, True):
                    torch.manual_seed(1)
                    shapes = [(10, 5, 2), (10, 2)] if gaps else [(10, 5), (10,)]
                    drawn = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
                    weight, bias = (Parameter(x[..., 0] if gaps else x) for x in drawn)
                    x = torch.randn(5, device=device, dtype=dtype)
                    opt = made(optim_info, settings, [weight, bias])
                    chain = [make(opt) for make in schedulers]
                    values = []
                    for _ in range(21):
                        opt.zero_grad()
                        loss = (weight.mv(x) + bias).square().sum()
                        values.append(loss.item())
                        loss.backward()
                        opt.step()
                        for scheduler in chain:
                            scheduler.step(*([values[-1]] if isinstance(scheduler, ReduceLROnPlateau) else []))
                    if settings.kwargs.get("maximize"):
                        self.assertGreater(values[-1], values[0])
                    else:
                        self.assertLess(values[-1], values[0])

    @optims(INFOS, dtypes=[torch.float64])
    def test_param_groups_have_their_own_lr_and_weight_decay(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            a, b = points(device, dtype)[:2]
            groups = [{"params": [a], "lr": 0.0}, {"params": [b], "weight_decay": 0.25}]
            opt = made(optim_info, settings, groups)
            before = [p.detach().clone() for p in (a, b)]
            a.grad, b.grad = torch.ones_like(a), torch.zeros_like(b)
            opt.step()
            self.assertEqual(a, before[0], rtol=0, atol=0)
            lr = lr_of(optim_info, settings)
            if opt.param_groups[1].get("gains"):  # which start so that no first step is longer than this
                lr = min(lr, 3e-3)
            self.assertEqual(b, (1 - 0.25 * lr) * before[1])
            self.assertEqual(opt.param_groups[0].keys(), opt.param_groups[1].keys())

    @optims(INFOS, dtypes=[torch.float32])
    def test_groups_learn_with_options_of_their_own(self, device, dtype, optim_info):
        """Torch's `test_param_groups_lr` and `test_param_groups_weight_decay`."""
        for settings in optim_info.optim_inputs_func(device, dtype):
            outer = {k: v for k, v in settings.kwargs.items() if k in OF_THE_OPTIMIZER}
            own = {"lr": 1e-3, **{k: v for k, v in settings.kwargs.items() if k not in outer}}
            for decay in (False, True):
                torch.manual_seed(1)
                weight, bias, idle, x = (
                    torch.randn(shape, device=device, dtype=dtype) for shape in ((10, 5), (10,), (2,), (5,))
                )
                weight, bias, idle = Parameter(weight), Parameter(bias), Parameter(idle)
                before = idle.detach().clone()
                if decay:
                    groups = [{"params": [weight], **own}, {"params": [bias], **own, "weight_decay": 0.0}]
                else:
                    groups = [{"params": [weight, bias], **own}, {"params": [idle]}]
                opt = optim_info.optim_cls(groups, **{"lr": 1e-28, **outer})
                values = []
                for _ in range(20):
                    opt.zero_grad()
                    loss = (weight.mv(x) + bias).square().sum()
                    values.append(loss.item())
                    loss.backward()
                    idle.grad = torch.rand_like(idle)
                    opt.step()
                self.assertEqual(values[-1] > values[0], bool(settings.kwargs.get("maximize")), msg=settings.desc)
                self.assertEqual(idle, before)

    @optims(INFOS, dtypes=[torch.complex64, torch.complex128])
    def test_complex_parameters_are_pairs_of_reals(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            z = points(device, dtype)
            pairs = [Parameter(torch.view_as_real(p.detach()).clone()) for p in z]
            complex_, real = made(optim_info, settings, z), made(optim_info, settings, pairs)
            for t in range(4):
                advance_by = [torch.randn_like(p, requires_grad=False) for p in z]
                for p, q, g in zip(z, pairs, advance_by, strict=True):
                    p.grad, q.grad = g.detach(), torch.view_as_real(g.detach()).clone()
                complex_.step()
                real.step()
                self.assertEqual([torch.view_as_real(p.detach()) for p in z], pairs, msg=f"{settings.desc}, {t}")

    @optims(INFOS, dtypes=[torch.float32])
    def test_a_step_without_gradients_is_none(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            params = points(device, dtype)
            opt = made(optim_info, settings, params)
            before = copy.deepcopy(params)
            opt.step()
            self.assertEqual(params, before, rtol=0, atol=0)
            self.assertEqual(len(opt.state), 0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_zero_gradients_move_nothing_but_decay(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            params = points(device, dtype)
            opt = made(optim_info, settings, params)
            before = copy.deepcopy(params)
            for p in params:
                p.grad = torch.zeros_like(p)
            opt.step()
            self.assertEqual(
                all(map(torch.equal, params, before)), not opt.param_groups[0]["weight_decay"], msg=settings.desc
            )

    @optims(INFOS, dtypes=[torch.float32])
    def test_it_can_be_printed(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            opt = made(optim_info, settings, points(device, dtype))
            text = str(opt)
            self.assertTrue(all(f"{key}:" in text for key in opt.param_groups[0] if key != "params"))

    @optims(INFOS, dtypes=[torch.float32])
    def test_a_loaded_state_goes_on_in_the_same_way(self, device, dtype, optim_info):
        """State dicts as they are, through a file with weights_only, to named parameters and back."""
        for settings in optim_info.optim_inputs_func(device, dtype):
            params = points(device, dtype)
            opt = made(optim_info, settings, params)
            advance(opt, params, 3)
            state = copy.deepcopy(opt.state_dict())
            buffer = io.BytesIO()
            torch.save(state, buffer)
            buffer.seek(0)
            for saved in (state, torch.load(buffer, weights_only=True)):
                for named in (False, True):
                    twins = copy.deepcopy(params)
                    given = [(f"x{j}", p) for j, p in enumerate(twins)] if named else twins
                    other = made(optim_info, settings, given)
                    other.load_state_dict(copy.deepcopy(saved))
                    self.assertEqual(other.state_dict()["state"], saved["state"], rtol=0, atol=0)
                    original = copy.deepcopy((params, opt))
                    advance(original[1], original[0], 3, seed=1)
                    advance(other, twins, 3, seed=1)
                    self.assertEqual(original[0], twins, rtol=0, atol=0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_runs_are_deterministic(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            runs = [points(device, dtype) for _ in range(2)]
            for params in runs:
                advance(made(optim_info, settings, params), params, 4)
            self.assertEqual(*runs, rtol=0, atol=0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_deepcopy_copies_all_public_attributes(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            params = points(device, dtype)
            opt = made(optim_info, settings, params)
            advance(opt, params, 2)
            twin = copy.deepcopy(opt)
            public = sorted(name for name in vars(opt) if not name.startswith("_"))
            self.assertEqual(sorted(name for name in vars(twin) if not name.startswith("_")), public)
            # parameters differ, and torch adds flags that it once did not have to the defaults of a copy
            for name in set(public) - {"state", "param_groups", "defaults"}:
                self.assertEqual(getattr(opt, name), getattr(twin, name), rtol=0, atol=0, msg=name)

    @optims(INFOS, dtypes=[torch.float32])
    def test_no_state_is_empty_after_a_step(self, device, dtype, optim_info):
        """Torch's `test_non_empty_state`; and no parameter is left out."""
        for settings in optim_info.optim_inputs_func(device, dtype):
            model = torch.nn.Linear(5, 5, device=device, dtype=dtype)
            opt = made(optim_info, settings, model.parameters())
            model(torch.rand(2, 5, device=device, dtype=dtype)).sum().backward()
            opt.step()
            self.assertEqual(set(opt.state), set(model.parameters()))
            for state in opt.state.values():
                self.assertGreater(len(state), 0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_states_of_equal_runs_are_equal(self, device, dtype, optim_info):
        """Torch's `test_state_dict_deterministic`, with its clause on repeated parameters (torch's issue 36831)."""

        def train(opt, weight, bias, x):
            opt.zero_grad()
            (weight.mv(x) + bias).square().sum().backward()
            opt.step()

        def listed(params, named):
            return [(f"name{j}", p) for j, p in enumerate(params)] if named else params

        def nameless(state):
            return [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]

        x = torch.randn(3, device=device, dtype=dtype)
        for settings in optim_info.optim_inputs_func(device, dtype):
            for first, second in ((False, False), (False, True), (True, False), (True, True)):
                params = [Parameter(torch.randn(s, device=device, dtype=dtype)) for s in ((2, 3), (2,))]
                opt = made(optim_info, settings, listed(params, first))
                for _ in range(10):
                    train(opt, *params, x)
                twins = [Parameter(p.detach().clone()) for p in params]
                twin = made(optim_info, settings, listed(twins, second))
                twin.load_state_dict(copy.deepcopy(opt.state_dict()))
                for _ in range(10):
                    train(opt, *params, x)
                    train(twin, *twins, x)
                    self.assertEqual(params, twins)
                self.assertEqual(opt.state_dict()["state"], twin.state_dict()["state"])
                self.assertEqual(nameless(opt.state_dict()), nameless(twin.state_dict()))
                twin.param_groups.extend(twin.param_groups)
                self.assertEqual(nameless(opt.state_dict())[-1], nameless(twin.state_dict())[-1])

    @optims(INFOS, dtypes=[torch.float32])
    def test_a_state_without_newer_flags_loads(self, device, dtype, optim_info):
        """Torch's `test_can_load_older_state_dict`: a state of before `maximize` and others."""
        for settings in optim_info.optim_inputs_func(device, dtype):
            model = torch.nn.Sequential(torch.nn.Conv2d(4, 2, 1, stride=2), torch.nn.BatchNorm2d(2))
            model.to(device=device, dtype=dtype)
            x = torch.rand(1, 4, 16, 16, device=device, dtype=dtype)
            opt = made(optim_info, settings, model.parameters())

            def train(opt, model=model, x=x):
                opt.zero_grad()
                model(x).sum().backward()
                opt.step()

            for _ in range(3):
                train(opt)
            old = copy.deepcopy(opt.state_dict())
            for group in old["param_groups"]:
                for flag in ("maximize", "foreach", "fused", "differentiable", "capturable"):
                    group.pop(flag, None)
            opt.load_state_dict(old)
            train(opt)

    @optims(INFOS, dtypes=[torch.float32])
    def test_a_step_count_that_is_no_tensor_loads(self, device, dtype, optim_info):
        """Torch's `test_load_nontensor_step`; and one that is a tensor, as it is on devices."""
        for settings in optim_info.optim_inputs_func(device, dtype):
            params = points(device, dtype)
            opt = made(optim_info, settings, params)
            advance(opt, params, 3)
            for kind in (lambda step: step.item() if torch.is_tensor(step) else step, torch.as_tensor):
                state = copy.deepcopy(opt.state_dict())
                for entry in state["state"].values():
                    if "step" in entry:
                        entry["step"] = kind(entry["step"])
                opt.load_state_dict(state)
                advance(opt, params)

    @optims(INFOS, dtypes=[torch.float32])
    def test_hooks(self, device, dtype, optim_info):
        settings = optim_info.optim_inputs_func(device, dtype)[1]
        params, log = points(device, dtype), []
        opt = made(optim_info, settings, params)
        handles = [
            opt.register_step_pre_hook(lambda o, args, kwargs: log.append("pre")),
            opt.register_step_post_hook(lambda o, args, kwargs: log.append("post")),
            register_optimizer_step_pre_hook(lambda o, args, kwargs: log.append("all pre")),
            register_optimizer_step_post_hook(lambda o, args, kwargs: log.append("all post")),
            opt.register_state_dict_pre_hook(lambda o: log.append("saving")),
            opt.register_state_dict_post_hook(lambda o, state: log.append("saved")),
            opt.register_load_state_dict_pre_hook(lambda o, state: log.append("loading")),
            opt.register_load_state_dict_post_hook(lambda o: log.append("loaded")),
        ]
        advance(opt, params)
        opt.load_state_dict(opt.state_dict())
        expected = ["all pre", "pre", "post", "all post", "saving", "saved", "loading", "loaded"]
        self.assertEqual(log, expected)
        for handle in handles:
            handle.remove()
        advance(opt, params)
        opt.load_state_dict(opt.state_dict())
        self.assertEqual(log, expected)

    @optims(INFOS, dtypes=[torch.float64])
    def test_a_tensor_lr_is_a_number(self, device, dtype, optim_info):
        for settings in optim_info.optim_inputs_func(device, dtype):
            numbers, tensors = points(device, dtype), points(device, dtype)
            lr = lr_of(optim_info, settings)
            a = optim_info.optim_cls(numbers, **{**settings.kwargs, "lr": lr})
            b = optim_info.optim_cls(tensors, **{**settings.kwargs, "lr": torch.tensor(lr, dtype=dtype)})
            advance(a, numbers, 3)
            advance(b, tensors, 3)
            self.assertEqual(numbers, tensors, rtol=0, atol=0)
            self.assertIsInstance(b.param_groups[0]["lr"], torch.Tensor)

    @optims(INFOS, dtypes=[torch.float32])
    def test_a_state_moves_with_its_parameters_to_another_device(self, device, dtype, optim_info):
        if not torch.cuda.is_available():
            raise SkipTest("needs CUDA")
        for settings in optim_info.optim_inputs_func(device, dtype):
            params = points(device, dtype)
            opt = made(optim_info, settings, params)
            advance(opt, params, 2)
            moved = [Parameter(p.detach().cuda()) for p in params]
            other = optim_info.optim_cls(moved, **{**settings.kwargs, "backend": "auto"})
            other.load_state_dict(opt.state_dict())
            tensors = [x for x in other.state[moved[0]].values() if isinstance(x, torch.Tensor)]
            self.assertTrue(all(x.is_cuda for x in tensors))


instantiate_device_type_tests(TestExaminer, globals(), only_for=("cpu",))


def test_exclusions_are_justified_in_one_line():
    assert all(reason and "\n" not in reason for reason in EXCLUDED.values())
