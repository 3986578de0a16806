"""Cross entropy of a softmax over the vocabulary, or of a mixture of them, without the matrix of logits.

    s_k = W h_k + b,   z = s, or s + log sigmoid(s) for sigsoftmax,   a_k = log pi_k + log softmax(z_k)_x
    nll = -log sum_k exp(a_k)                                                            (one softmax: -a)
    d nll / d z_k = gamma_k (softmax(z_k) - [v = x]),   d nll / d log pi_k = -gamma_k,   gamma = softmax(a)

With weights c_t known, sum_t c_t nll_t has its gradients formed in the forward pass, from the one matrix of logits: three
products for each chunk of tokens (docs/derivations/mixture_of_softmaxes.md). gamma couples the K rows of a token.
An adaptive softmax computes a tail for the tokens of its own cluster only (docs/derivations/adaptive_softmax.md). Label
smoothing over its tails and mixtures, where every word counts, is left to the definition.
Limits: no double backward and no functorch transforms; `fullrank.kernel("reference")` has them.

Before that stands what all engines share: operators that a compiler does not look into, and products with weights (`multiply`).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from fullrank.core import draws
from fullrank.core.engine import Cluster, Components
from fullrank.core.output import project_states
from fullrank.kernels.build import library

# -- what engines share: operators that a compiler does not look into, and words to a compiler -------------------------

Function = TypeVar("Function", bound=Callable[..., Any])

# An operator that keeps tensors for later calls, so that a CUDA graph must not hold it. torch has the tag from 2.9 on.
_TAGS: dict[str, Any] = {}
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _TAGS["tags"] = (torch.Tag.cudagraph_unsafe,)
_TENSORS: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?"}
_SCHEMA = _TENSORS | {bool: "bool", int: "int", float: "float", list[int]: "int[]", torch.dtype: "ScalarType"}


def define_operator(
    name: str,
    arguments: Callable[..., Any],
    operands: int,
    forward: Callable[[Any], tuple[Tensor, Tensor]],
    backward: Callable[[Any, Tensor, Tensor, Sequence[bool]], list[Tensor]],
    fake: Callable[[Any], tuple[Tensor, Tensor]],
    what: str,
) -> Callable[[Any], Tensor]:
    """Define the operator `fullrank::name`, once differentiable, as a function of `arguments`.

    Args:
        name: of the operator.
        arguments: a NamedTuple that begins with tensors, of which the first have gradients.
        operands: how many of them have gradients.
        forward: takes `arguments`; returns the output, and a tensor that is saved for the backward pass.
        backward: takes `arguments`, the cotangent, what was saved, and which gradients are wanted; returns the gradients of
            the operands, as `make_gradients` has them.
        fake: as `forward`, without numbers: tensors of the same shapes, for a compiler.
        what: the operator in the words of an error.

    Returns:
        A function of `arguments` that returns the output.
    """
    kinds = get_type_hints(arguments)
    schema = ", ".join(f"{_SCHEMA[kind]} {field}" for field, kind in kinds.items())
    tensors = sum(kind in _TENSORS for kind in kinds.values())

    def run(*values: Any) -> tuple[Tensor, Tensor]:
        return forward(arguments(*values))

    def run_backward(cotangent: Tensor, saved: Tensor, wanted: Sequence[bool], *values: Any) -> list[Tensor]:
        return backward(arguments(*values), cotangent, saved, wanted)

    def fake_backward(cotangent: Tensor, saved: Tensor, wanted: Sequence[bool], *values: Any) -> list[Tensor]:
        return make_gradients(wanted, values[:operands], cotangent)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.choices = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def differentiate(run: Callable[..., Any], ctx: Any, cotangent: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        if not torch.compiler.is_compiling():
            refuse_second_order(what)
        if cotangent is None:
            return (None,) * len(kinds)
        *inputs, saved = ctx.saved_tensors  # read once: under activation checkpointing they are gone then
        wanted = list(ctx.needs_input_grad[:operands])
        computed = run(cotangent, saved, wanted, *inputs, *ctx.choices)
        gradients = [gradient if want else None for gradient, want in zip(computed, wanted, strict=True)]
        return *gradients, *(None,) * (len(kinds) - operands)

    define: Any = partial(torch.library.custom_op, mutates_args=(), **_TAGS)
    operator = define(f"fullrank::{name}", run, schema=f"({schema}) -> (Tensor, Tensor)")
    operator.register_fake(lambda *values: fake(arguments(*values)))
    schema = f"(Tensor cotangent, Tensor kept, bool[] wanted, {schema}) -> Tensor[]"
    backward_operator = define(f"fullrank::{name}_backward", run_backward, schema=schema)
    backward_operator.register_fake(fake_backward)
    operator.register_autograd(partial(differentiate, backward_operator), setup_context=save)

    class Eager(torch.autograd.Function):
        """The operator as an autograd function, which costs less and stops a compiler."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            return differentiate(run_backward, ctx, *cotangents)

    def call(values: Any) -> Tensor:
        # the operator is taken where somebody looks at operators, or operands have no addresses
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        chosen = operator
        if not watched and all(type(value) in (Tensor, nn.Parameter, type(None)) for value in values[:operands]):
            chosen = Eager.apply
        output: Tensor = chosen(*values)[0]
        return output

    return call


def make_gradients(wanted: Sequence[bool], operands: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Make room for the gradients of operands; their last dimension is dense.

    Args:
        wanted: whether the gradient of each operand is asked for.
        operands: the tensors, or None.
        like: a tensor of the dtype and device of the empty gradients.

    Returns:
        A tensor for each operand; without numbers for one that is None or not wanted.
    """
    rooms = []
    for want, x in zip(wanted, operands, strict=True):
        if x is None or not want:
            rooms.append(like.new_empty(0))
        else:
            rooms.append(torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape))
    return rooms


def refuse_second_order(what: str) -> None:
    """Raise RuntimeError, from a backward pass, where that is to be differentiated again.

    Autograd would take the gradients for constants where their cotangent is one, and say nothing.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"no second derivative (create_graph=True) of {what}: compute it inside "
            '`with fullrank.kernel("reference"):`, which keeps all numbers'
        )


def device_kind(tensor: Tensor) -> str:
    """Return the kind of device as autocast knows it; it does not know `meta`."""
    return "cpu" if tensor.device.type == "meta" else tensor.device.type


def product_dtype(operand: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product: that of autocast, or without it, and in fp64, that of the weight."""
    kind = device_kind(operand)
    is_narrow = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_narrow else weight.dtype


def is_transformed() -> bool:
    """Return whether a transform of torch.func is active, which operators written by hand do not know."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


# whether `torch.export` makes a graph, which is for inputs of any size; PyTorch 2.6 cannot tell
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def mark_constant(function: Function) -> Function:
    """Let a compiler call the function while it traces, and take the answer for a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but imports the compiler: two seconds at each start.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


_disabled: dict[Callable[..., Any], Any] = {}


def leave_out_of_graphs(function: Function) -> Function:
    """Return the function as one that a compiler leaves out of its graphs; unchanged where no compiler is imported."""
    _disable(function)
    return cast("Function", _disabled[function])


@mark_constant
def _disable(function: Callable[..., Any]) -> None:
    if "torch._dynamo" not in sys.modules:
        _disabled[function] = function
    elif _disabled.get(function, function) is function:
        _disabled[function] = torch.compiler.disable(function)


# -- products with weights ---------------------------------------------------------------------------------------------

_LEAST_MOVED = 1 << 17  # numbers that are worth a thread
_LEAST_PRODUCT = 1 << 20  # multiply-adds from which a call of oneDNN pays


@functools.cache
def prefers_onednn() -> bool:
    """Return whether oneDNN is the faster library: on a processor with AVX-512 that is not Intel's.

    MKL, which PyTorch takes for fp32, has no AVX-512 for such a processor. oneDNN, which is part of PyTorch, has. On a Zen 5
    it takes 0.45 of the time of MKL.
    """
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "GenuineIntel" not in processor and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def transpose(matrix: Tensor) -> Tensor:
    """Transpose a matrix (N, M) in fp32 to one without gaps; `t().contiguous()` takes one thread, three times as long."""
    kernels = library() if matrix.stride(1) == 1 else None
    if kernels is None:
        return matrix.t().contiguous()
    rows, columns = matrix.shape
    turned = matrix.new_empty(columns, rows)
    threads = max(1, min(torch.get_num_threads(), matrix.numel() // _LEAST_MOVED))
    kernels.fullrank_transpose(matrix.data_ptr(), matrix.stride(0), turned.data_ptr(), rows, columns, threads)
    return turned


class OneDnnProduct(torch.autograd.Function):
    """x W' + b by oneDNN. Its gradients are such products themselves, so that there are gradients of every order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) > 1:
            x = transpose(x.t())  # oneDNN would have it copied by one thread
        return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = cotangent.flatten(0, -2)
        needs = ctx.needs_input_grad
        d_x = multiply(cotangent, weight.t()) if needs[0] else None
        d_weight = multiply(rows.t(), x.flatten(0, -2).t()) if needs[1] else None
        return d_x, d_weight, rows.sum(0) if needs[2] else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight, x W' + b, as `torch.nn.functional.linear`, by the faster library.

    Args:
        x: (.., E).
        weight: (V, E).
        bias: (V,); None for none.

    Returns:
        (.., V).
    """
    product = multiply_large(x, weight, bias)
    return F.linear(x, weight, bias) if product is None else product


def takes_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether oneDNN is the faster library for a product.

    It is never inside `torch.backends.mkldnn.flags(enabled=False)`.

    Args:
        x: (.., E).
        weight: (V, E).
        bias: (V,); None for none.
    """
    is_large = x.dim() > 1 and x.numel() * weight.shape[0] >= _LEAST_PRODUCT and x.dtype == torch.float32
    is_chosen = is_large and prefers_onednn() and bool(torch.backends.mkldnn.enabled)
    operands = (x, weight) if bias is None else (x, weight, bias)
    return is_chosen and are_plain(*operands) and x.shape[-1] == weight.shape[1]


def multiply_large(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Multiply by oneDNN, as `multiply` does.

    Args:
        x: (.., E).
        weight: (V, E).
        bias: (V,); None for none.

    Returns:
        (.., V); None where oneDNN is not the faster library.
    """
    if not takes_onednn(x, weight, bias):
        return None
    # oneDNN reads a bias as if it were dense, and takes seconds where rows or columns of the weight have gaps
    if bias is not None:
        bias = bias.contiguous()
    if not weight.t().is_contiguous():
        weight = weight.contiguous()
    return cast("Tensor", OneDnnProduct.apply(x, weight, bias))


def are_plain(*operands: Tensor) -> bool:
    """Return whether operands are dense, on a CPU, of one dtype, and nobody traces, watches, casts or transforms them."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    is_traced = torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0
    if is_traced or is_transformed() or forward_ad._current_level >= 0:
        return False
    for tensor in operands:
        is_dense = tensor.is_cpu and tensor.layout is torch.strided
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != operands[0].dtype or not is_dense:
            return False
    return True


# -- one softmax of the vocabulary -------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Losses of C tokens, and their gradients.

    loss, nll (C,): with and without label smoothing.  gradient (C K, V), of `loss` with respect to z, to be multiplied by
    `share` (C, K); None: by one. That with respect to log pi is -share.
    """

    loss: Tensor
    nll: Tensor
    gradient: Tensor
    share: Tensor | None = None


# hidden (T K, E), log_prior (T, K) or None, weight (V, E), bias (V,) or None
_Operands = Sequence[Tensor | None]


class _Pass:
    """One pass over all tokens, a chunk of logits at a time, with or without the gradients of a weighted sum.

    The K rows of a token are never parted.
    dtype: of the products, under autocast narrower than `wide`, which softmax, nll and the sums over chunks have.
    Scratch memory is a chunk of logits: as many bytes as the gradient of W takes, but 16 MiB at least and 128 MiB at most (on
    a GPU always 256 MiB, counted in fp32), and never less than 64 rows. With oneDNN dW is made piece by piece.

    The gradients, where `needs` asks for them, over rows r with scales c and d loss / d logits G:

        dh_r = c_r W' G_r,    dW = sum_r c_r G_r h_r',    db = sum_r c_r G_r
    """

    def __init__(
        self, operands: _Operands, normalize: str, dtype: torch.dtype, needs: Sequence[bool] = (False,) * 4
    ) -> None:
        hidden, log_prior, weight, bias = operands
        assert hidden is not None
        assert weight is not None
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.hidden = hidden.to(dtype)
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(self.wide)
        self.log_prior = None if log_prior is None else log_prior.to(self.wide)
        self.normalize = normalize
        self.needs = needs
        self.on_cpu = hidden.device.type == "cpu"
        self.mixtures = 1 if log_prior is None else log_prior.shape[1]
        self.tokens = hidden.shape[0] // self.mixtures
        self.hidden_grad = torch.empty_like(self.hidden, dtype=self.wide) if needs[0] else None
        self.prior_grad = torch.empty_like(self.log_prior) if self.log_prior is not None and needs[1] else None
        self.weight_grad = torch.zeros_like(self.weight) if needs[2] and self.tokens == 0 else None
        self.bias_grad = torch.zeros_like(self.bias) if self.bias is not None and needs[3] else None

    def losses(self, ids: Tensor, smoothing: float, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute loss and nll (T,); the gradients are those of sum_t scale_t loss_t, scale (T,)."""
        loss = torch.empty(ids.shape, dtype=self.wide, device=self.hidden.device)
        nll = torch.empty_like(loss) if smoothing else loss
        with torch.autocast(device_kind(loss), enabled=False):
            for chunk in self._chunks():
                self._compute_chunk(
                    chunk, ids, smoothing, scale, loss, nll
                )  # whose logits are gone before the next ones
        return loss, nll

    def _compute_chunk(
        self, chunk: slice, ids: Tensor, smoothing: float, scale: Tensor | None, loss: Tensor, nll: Tensor
    ) -> None:
        """Write loss and nll of a chunk of tokens, and add its gradients."""
        logits = multiply(self.hidden[self._rows(chunk)], self.weight)  # without the bias; overwritten by the gradient
        scales = logits.new_empty(logits.shape[0], dtype=self.wide)
        for piece, scores in self._blocks(logits):
            tokens = slice(chunk.start + piece.start, chunk.start + piece.stop)
            rows = self._rows(piece)
            slope = None  # d z / d s, where it is not one
            if self.normalize == "sigsoftmax":
                if any(self.needs):
                    slope = torch.sigmoid(-scores).add_(1)
                scores.add_(F.logsigmoid(scores))
            if self.log_prior is None:
                block = _compute_softmax(scores, ids[tokens], smoothing)
            else:
                block = _compute_mixture(scores, ids[tokens], self.log_prior[tokens])
            loss[tokens] = block.loss
            nll[tokens] = block.nll
            if not any(self.needs):
                continue
            assert scale is not None
            token_scales = scale[tokens, None]
            if self.prior_grad is not None:
                assert block.share is not None
                self.prior_grad[tokens] = -token_scales * block.share
            each = token_scales if block.share is None else token_scales * block.share
            scales[rows] = each.reshape(-1)
            gradient = block.gradient if slope is None else block.gradient.mul_(slope)
            if self.bias_grad is not None:
                self.bias_grad.addmv_(gradient.t(), scales[rows])
            logits[rows].copy_(gradient)
        if any(self.needs):
            self._add_chunk(self._rows(chunk), logits, scales)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to hidden, log_prior, weight and bias; None for one that is not needed."""
        return self.hidden_grad, self.prior_grad, self.weight_grad, self.bias_grad

    def _rows(self, tokens: slice) -> slice:
        return slice(tokens.start * self.mixtures, tokens.stop * self.mixtures)

    def _chunks(self) -> Iterator[slice]:
        """Cut the tokens into chunks, so large that a pass over dW for each costs little."""
        vocabulary, width = self.weight.shape
        if self.on_cpu:
            budget = min(max(4 * width * vocabulary, 16 << 20), 128 << 20)  # bytes
            rows = budget // (vocabulary * self.weight.element_size())
        else:  # the block of a GPU is the chunk, in `wide`
            rows = min((256 << 20) // (vocabulary * self.wide.itemsize), 4096)
        most = max(rows // self.mixtures, -(-64 // self.mixtures))  # tokens
        return _pieces(self.tokens, most)

    def _blocks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield a few tokens at a time and their logits, in `wide` and with the bias.

        On a CPU they are so few that their logits stay in its cache. Tokens count from the first of `logits`. A block may be
        the memory of `logits`.
        """
        rows, vocabulary = logits.shape
        tokens = rows // self.mixtures
        most = max(tokens, 1)
        if self.on_cpu:
            most = max((1 << 19) // (vocabulary * self.mixtures), -(-16 // self.mixtures))
        for piece in _pieces(tokens, most):
            block = logits[self._rows(piece)].to(self.wide)
            yield piece, block if self.bias is None else block.add_(self.bias)

    def _add_chunk(self, rows: slice, gradient: Tensor, scale: Tensor) -> None:
        """Add the share of a chunk to dh and dW: G (C K, V) in the dtype of the products, scale c (C K,)."""
        if self.hidden_grad is not None:
            self.hidden_grad[rows] = multiply(gradient, self.weight.t()) * scale[:, None]
        if not self.needs[2]:
            return
        hidden = (self.hidden[rows] * scale[:, None]).to(gradient.dtype)
        if takes_onednn(gradient.t(), hidden.t()):
            self._add_by_pieces(gradient, hidden)
        elif self.weight_grad is not None and gradient.dtype == self.wide:
            self.weight_grad.addmm_(gradient.t(), hidden)
        elif self.weight_grad is None:
            self.weight_grad = gradient.t() @ hidden  # one chunk needs no sum: autograd widens it
        else:
            self.weight_grad = self.weight_grad.to(self.wide).add_(gradient.t() @ hidden)

    def _add_by_pieces(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add G' h to dW, a MiB of dW at a time: oneDNN adds to nothing, and copies G."""
        is_first = self.weight_grad is None
        if self.weight_grad is None:
            self.weight_grad = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
        vocabulary, width = self.weight.shape
        for words in _pieces(vocabulary, max((1 << 18) // width, 1)):
            product = multiply(gradient[:, words].t(), hidden.t())
            if is_first:
                self.weight_grad[words] = product
            else:
                self.weight_grad[words] += product


def _pieces(total: int, longest: int) -> Iterator[slice]:
    """Cut 0 .. total into the fewest pieces of at most `longest`, all nearly equally long."""
    count = -(-total // longest)
    return (slice(total * i // count, total * (i + 1) // count) for i in range(count))


def _softmax_and_nll(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax (R, V), nll (R,) and logsumexp (R,) of z (R, V), from one pass of exponentials.

    The largest probability is 1 / sum_v exp(z_v - max), at least 1/V: unlike that of an improbable target it never
    underflows, and -log of it is what the logsumexp is above the largest z.
    """
    top = z.amax(1)
    target = z.gather(1, ids[:, None]).squeeze(1)
    probability = torch.softmax(z, dim=1)
    above = -probability.amax(1).log()
    return probability, (top - target) + above, top + above


def _subtract_targets(gradient: Tensor, ids: Tensor, share: float) -> None:
    """Subtract a share from the entry of each row's target, in place."""
    subtracted = gradient.new_full((1, 1), -share).expand(len(ids), 1)
    gradient.scatter_add_(1, ids[:, None], subtracted)


def _compute_softmax(z: Tensor, ids: Tensor, e: float) -> _Block:
    """Compute the block of a single softmax, d loss / d z = softmax(z) - q."""
    gradient, nll, total = _softmax_and_nll(z, ids)
    loss = nll
    if e:
        loss = (1 - e) * nll + e * (total - z.mean(1))
        gradient.sub_(e / z.shape[1])
    _subtract_targets(gradient, ids, 1 - e)
    return _Block(loss, nll, gradient)


def _compute_mixture(z: Tensor, ids: Tensor, log_prior: Tensor) -> _Block:
    """Compute the block of a mixture where only the target counts.

    It is K cross entropies, weighted by how much each explains of the target.
    """
    tokens, mixtures = log_prior.shape
    ids = ids.repeat_interleave(mixtures)
    gradient, each, _ = _softmax_and_nll(z, ids)
    joint = log_prior - each.view(tokens, mixtures)
    total = torch.logsumexp(joint, dim=1)
    share = torch.exp(joint - total[:, None])
    _subtract_targets(gradient, ids, 1.0)
    return _Block(-total, -total, gradient, share)


class _Recomputed(torch.autograd.Function):
    """nll of each token (T,); the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, normalize: str, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        ctx.normalize = normalize
        ctx.dtype = dtype
        ctx.save_for_backward(ids, *operands)
        _, nll = _Pass(operands, normalize, dtype).losses(ids, 0.0)
        return nll

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("nll and loss")
        ids, *operands = ctx.saved_tensors
        run = _Pass(operands, ctx.normalize, ctx.dtype, ctx.needs_input_grad[3:])
        run.losses(ids, 0.0, cotangent)
        return None, None, None, *run.gradients()


class _WeightedLoss(torch.autograd.Function):
    """sum_t c_t loss_t with known c_t: the gradients are formed in the forward pass, from the one matrix of logits.

    Also returns sum_t c_t nll_t, without gradient: what the loss is before label smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        normalize: str,
        dtype: torch.dtype,
        scale: Tensor,
        smoothing: float,
        *operands: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        run = _Pass(operands, normalize, dtype, ctx.needs_input_grad[5:])
        loss, nll = run.losses(ids, smoothing, scale)
        # saved, so that they go with the graph: a loss that is kept after its backward pass keeps no gradients
        ctx.save_for_backward(*run.gradients())
        total = (loss * scale).sum()
        plain_total = (nll * scale).sum()
        ctx.mark_non_differentiable(plain_total)
        return total, plain_total

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("nll and loss")
        gradients = list(ctx.saved_tensors)
        # mostly it is one; asking a GPU would wait for it
        if cotangent.device.type != "cpu" or float(cotangent) != 1.0:
            gradients = [None if g is None else g.to(cotangent.dtype) * cotangent for g in gradients]
        return None, None, None, None, None, *gradients


class _Part(NamedTuple):
    """A cluster, and of its tokens the states and the targets, counted from its first word."""

    cluster: Cluster
    states: Tensor
    targets: Tensor


def _split_by_cluster(components: Components, ids: Tensor) -> tuple[_Part, list[tuple[Tensor, _Part]]]:
    """Split tokens by the cluster of their target.

    Returns the head, whose targets are words and classes of tails, and each tail behind the positions of its tokens. It
    takes one sort, and waits for a device once, to learn how many tokens each cluster has.
    """
    head, *tails = components.clusters
    if not tails:
        return _Part(head, components.states, ids), []
    words = len(head.weight) - len(tails)  # the head has a row for each tail, too
    sizes = [len(tail.weight) for tail in tails]
    starts = list(itertools.accumulate(sizes[:-1], initial=words))
    cluster = torch.zeros_like(ids)
    for start in starts:
        cluster += ids >= start
    ordered, order = cluster.sort(stable=True)
    numbers = torch.arange(len(starts) + 1, device=ids.device)
    ends: list[int] = torch.searchsorted(ordered, numbers, right=True).tolist()
    in_tails = order[ends[0] :]
    counts = [end - start for start, end in itertools.pairwise(ends)]
    positions = in_tails.split(counts)
    states = components.states.index_select(0, in_tails).split(counts)
    targets = [ids[place] - start for place, start in zip(positions, starts, strict=True)]
    classes = torch.where(cluster == 0, ids, words - 1 + cluster)
    parts = map(_Part, tails, states, targets)
    return _Part(head, components.states, classes), list(zip(positions, parts, strict=True))


def _apply(function: type[torch.autograd.Function], components: Components, part: _Part, *choices: Any) -> Any:
    """Apply a function to the softmax of one cluster."""
    cluster = part.cluster
    hidden = project_states(cluster, part.states).flatten(0, 1)
    operands: _Operands = (hidden, components.log_prior, cluster.weight, cluster.bias)
    if not torch.is_grad_enabled():  # a Function is told what requires gradients even then, and would form them in vain
        operands = [None if tensor is None else tensor.detach() for tensor in operands]
    dtype = product_dtype(hidden, cluster.weight)
    return function.apply(part.targets, components.normalize, dtype, *choices, *operands)


def vocabulary_nll(components: Components, ids: Tensor) -> Tensor:
    """Compute nll (T,), in the order of the tokens; a tail is computed for its own tokens."""
    head, tails = _split_by_cluster(components, ids)
    nll: Tensor = _apply(_Recomputed, components, head)
    for positions, tail in tails:
        with draws.select_tokens(positions, len(ids)):
            nll = nll.index_add(0, positions, _apply(_Recomputed, components, tail))
    return nll


def vocabulary_loss(
    components: Components, ids: Tensor, scale: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor] | None:
    """Compute weighted sums of loss and nll, with gradients formed in the forward pass.

    Args:
        components: the softmaxes of the vocabulary layer.
        ids: targets (T,).
        scale: weights of the tokens (T,).
        label_smoothing: share of the target that all words have in common; 0 for none.

    Returns:
        sum_t scale_t loss_t and, without gradient, sum_t scale_t nll_t; None for label smoothing over tails or mixtures.
    """
    if label_smoothing and (len(components.clusters) > 1 or components.log_prior is not None):
        return None
    head, tails = _split_by_cluster(components, ids)
    loss, nll = _apply(_WeightedLoss, components, head, scale, label_smoothing)
    for positions, tail in tails:
        with draws.select_tokens(positions, len(ids)):
            loss_inside, nll_inside = _apply(_WeightedLoss, components, tail, scale[positions], 0.0)
        loss = loss + loss_inside
        nll = nll + nll_inside
    return loss, nll
