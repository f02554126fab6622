# SPDX-License-Identifier: Apache-2.0
"""Makes one callable out of a native forward and backward, and decides, here and nowhere else, how a call enters it.

* plain eager call, no gradient wanted: the native function itself;
* eager call with gradient: ``torch.autograd.Function`` around it;
* anything else - compile, export, fake and functional tensors, vmap, tensor subclasses, dispatch modes, meta, a running
  profiler - the registered operator ``torch.ops.muspace_<family>.<operator>``, whose forward and backward carry fake
  kernels and an autograd formula.

The direct ways exist because a registered Python operator costs 10 to 20 µs a call. A FakeTensor must never reach the
native function (its data pointer is bogus), which is why the test is "exactly Tensor or Parameter" and not a list of
known exceptions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from muspace_core.spec import OpSpec

_NO_SECOND_DERIVATIVE = "{} can be differentiated once; its backward has no derivative"
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_profiler_enabled = torch.autograd._profiler_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_layer = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
#: Those of ``is_grads_batched`` and of ``jacobian(vectorize=True)`` come without a functorch layer.
_is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor


def takes_direct_path(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an eager call on exactly these tensors may skip torch's dispatcher."""
    if _is_compiling():
        return False
    for tensor in tensors:
        if (type(tensor) is not _TENSOR and type(tensor) is not _PARAMETER) or tensor.is_meta:
            return False
    return not (_dispatch_modes() or _profiler_enabled() or _functorch_layer() is not None or _tracing_state() is not None)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``torch.compile`` runs as it is, between two graphs.

    ``torch.compiler.disable`` itself would import dynamo, which takes seconds, wherever the decorated function is defined.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if _is_compiling():
            return torch.compiler.disable(function)(*arguments, **keywords)
        return function(*arguments, **keywords)

    return call


class Operator:
    """One registered operator; see ``register``."""

    def __init__(
        self,
        spec: OpSpec,
        forward: Callable[..., torch.Tensor],
        backward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
        tensor_count: int,
        differentiable: Sequence[int],
        unread: Sequence[int],
    ) -> None:
        self.spec = spec
        self.tensor_count = tensor_count
        self._forward = forward
        self._differentiable = tuple(differentiable)
        self._function = _autograd_function(spec.package, spec.name, forward, backward, tensor_count, differentiable, unread)
        namespace = getattr(torch.ops, spec.package)
        self.forward_op = getattr(namespace, spec.name).default
        self.backward_op = getattr(namespace, f"{spec.name}_backward").default

    def records_gradient(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call on these tensors records a backward."""
        if _is_grad_enabled():
            for index in self._differentiable:  # any() over a generator costs three times as much
                if tensors[index].requires_grad:
                    return True
        return False

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if _is_compiling():
            return self.forward_op(*arguments)
        tensors = arguments[: self.tensor_count]
        if forward_ad._current_level >= 0:
            _refuse_tangents(self.spec.name, [tensors[index] for index in self._differentiable])
        if not takes_direct_path(tensors):
            return self.forward_op(*arguments)
        if self.records_gradient(tensors):
            return self._function.apply(*arguments)
        return self._forward(*arguments)


def _refuse_tangents(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """No path would carry a tangent; all would drop it without a word."""
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has no forward-mode derivative; use reverse mode")


def _to_save(tensors: Sequence[torch.Tensor], unread: Sequence[int]) -> Sequence[torch.Tensor]:
    """The tensors for the backward; of those it does not read only shape, dtype and device, so that the memory can go."""
    if not unread:
        return tensors
    return [_shape_of(t) if place in unread else t for place, t in enumerate(tensors)]


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """One element expanded to the shape of ``tensor``."""
    if type(tensor) is _TENSOR or type(tensor) is _PARAMETER:  # new_empty of a lazy negation would copy it first
        return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return tensor.new_empty(()).expand(tensor.shape)


def _autograd_function(
    package: str,
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    tensor_count: int,
    differentiable: Sequence[int],
    unread: Sequence[int],
) -> Any:
    """The autograd.Function of a direct call, named after the operator.

    ``once_differentiable`` would not do: it lets a second derivative through as a constant where the incoming gradient needs
    none. So with ``create_graph`` the backward is a function of its own, whose backward refuses.
    """

    def refuse(_ctx: Any, *_grads: Any) -> None:
        raise RuntimeError(_NO_SECOND_DERIVATIVE.format(name))

    def run_once(_ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return backward(*arguments)

    members: dict[str, Any] = {"forward": staticmethod(run_once), "backward": staticmethod(refuse)}
    once: Any = type(f"{name}_backward", (torch.autograd.Function,), members)

    def run_forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(*_to_save(arguments[:tensor_count], unread))
        ctx.options = arguments[tensor_count:]
        return forward(*arguments)

    def run_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"the backward of {name}", [grad_output])
        if not takes_direct_path((grad_output,)) or _is_batched_gradient(grad_output):
            call = getattr(getattr(torch.ops, package), f"{name}_backward").default
        else:
            call = once.apply if torch.is_grad_enabled() else backward
        grads = call(grad_output, *ctx.saved_tensors, *ctx.options)
        return _spread(grads, differentiable, tensor_count + len(ctx.options), ctx.needs_input_grad)

    members = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(name, (torch.autograd.Function,), members)


def _spread(
    grads: torch.Tensor | Sequence[torch.Tensor], differentiable: Sequence[int], count: int, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients at the positions of their arguments, ``None`` elsewhere and where none is wanted."""
    out: list[torch.Tensor | None] = [None] * count
    if isinstance(grads, torch.Tensor):  # the schema of one gradient has one result, not a tuple
        grads = (grads,)
    for index, grad in zip(differentiable, grads, strict=True):
        if needed[index]:
            out[index] = grad
    return tuple(out)


def register(
    spec: OpSpec,
    *,
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    fake_forward: Callable[..., torch.Tensor],
    fake_backward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    tensor_count: int,
    differentiable: Sequence[int],
    unread: Sequence[int] = (),
) -> Operator:
    """Registers ``spec`` with torch and returns the callable that its public function uses.

    ``forward(*tensors, *options)`` and ``backward(grad_output, *tensors, *options)`` run natively and return fresh tensors;
    the fakes return empty tensors of the same shapes. The first ``tensor_count`` arguments are tensors, all of them saved;
    ``backward`` returns one gradient for each position in ``differentiable``, the tensor itself where that is one; of
    the tensors at ``unread`` it sees shape, dtype and device alone. The result can be differentiated once.
    """
    library = torch.library.Library(spec.package, "FRAGMENT")
    _LIBRARIES.append(library)
    backward_name = f"{spec.name}_backward"
    library.define(f"{spec.name}{spec.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.define(f"{backward_name}{spec.backward_schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(spec.name, forward, "CompositeExplicitAutograd")
    library.impl(backward_name, backward, "CompositeExplicitAutograd")
    torch.library.register_fake(spec.qualified_name, fake_forward, lib=library)
    torch.library.register_fake(f"{spec.qualified_name}_backward", fake_backward, lib=library)
    operator = Operator(spec, forward, backward, tensor_count, differentiable, unread)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*_to_save(inputs[:tensor_count], unread))
        ctx.options = inputs[tensor_count:]

    def registered_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"the backward of {spec.name}", [grad_output])
        grads = operator.backward_op(grad_output, *ctx.saved_tensors, *ctx.options)
        return _spread(grads, differentiable, tensor_count + len(ctx.options), ctx.needs_input_grad)

    def refuse(_ctx: Any, *_grads: Any) -> None:
        raise RuntimeError(_NO_SECOND_DERIVATIVE.format(spec.name))

    torch.library.register_autograd(spec.qualified_name, registered_backward, setup_context=setup_context, lib=library)
    torch.library.register_autograd(f"{spec.qualified_name}_backward", refuse, lib=library)
    return operator


#: A Library unregisters its operators when it is collected.
_LIBRARIES: list[torch.library.Library] = []
