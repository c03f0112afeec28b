"""Linear layers as this machine multiplies them best: packed once for oneDNN, or int8 with a scale per token.

A kernel is a module that stands where ``nn.Linear`` stood (``replace``). Each proves on random numbers that it
computes what it says before it is used. Which layers get which kernel is the caller's choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

from eval_kernel.errors import PrecisionUnsupported

#: Fused activations: the model's name for it, and oneDNN's name and algorithm.
FUSED = {"silu": ("swish", ""), "swish": ("swish", ""), "gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh")}
#: Batch for which weights are packed; oneDNN's layout may depend on it, so it is one number everywhere.
PACK_ROWS = 1024
#: Outputs of one tile of a head: with 128 positions, 1 MB of float32 logits, a core's second-level cache.
TILE = 2048
#: Sums of at most so many products of int8 values are exact in float32: 1024 * 127 * 127 < 2^24.
EXACT_TERMS = 1024


class PackedLinear(torch.nn.Module):
    """``x @ W.T + b`` with weights packed for oneDNN: 1.1 times MKL's speed in float32, and fusions with what follows.

    From two rows on, a row's bits do not depend on how many rows go together (tested).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.numel() * weight.element_size()
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in] to [..., out]."""
        out = self._unary(x.reshape(-1, self.in_features), "none", "")
        return out.view(*x.shape[:-1], self.out_features)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """``activation(x @ W.T + b)`` for a name in ``FUSED``; x is [rows, in]."""
        return self._unary(x, *FUSED[activation])

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """``(x @ W.T + b) * factor``, rounded once."""
        return self._binary(x, factor, "mul")

    def plus(self, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        """``(x @ W.T + b) + term``, rounded once."""
        return self._binary(x, term, "add")

    def _unary(self, x: torch.Tensor, name: str, algorithm: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, name, [], algorithm)
        return out

    def _binary(self, x: torch.Tensor, other: torch.Tensor, name: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self._bias, name)
        return out


class Int8Linear(torch.nn.Module):
    """Weights in int8 with a scale per output, activations in int8 with a scale per token, products summed exactly.

    y[t, n] = (sum over k of xq[t, k] * wq[n, k]) * ws[n] * xs[t] + b[n], symmetric, scales from the largest magnitude.
    The sum is an exact integer on every device; what differs is at most the rounding of the last two products.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        wide = weight.detach().float()
        scales = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self._build((wide / scales[:, None]).round_().to(torch.int8), scales, bias)

    @classmethod
    def from_integers(cls, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
        """Build from int8 values [out, in] and float32 scales [out] that somebody else chose."""
        kernel = cls.__new__(cls)
        super().__init__(kernel)
        kernel.out_features, kernel.in_features = weight.shape
        kernel._build(weight, scales, bias)
        return kernel

    def _build(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.nbytes = weight.numel() + scales.numel() * scales.element_size()
        self._bias = None if bias is None else bias.detach().float()
        self.route = int8_route(weight.device.type)
        # A head of many outputs is kept in tiles, so that whoever wants them one by one need not cut it again.
        self.tiles: list[Int8Linear] = []
        if self.out_features > 2 * TILE:
            for start in range(0, self.out_features, TILE):
                part = slice(start, start + TILE)
                self.tiles.append(
                    Int8Linear.from_integers(weight[part], scales[part], None if bias is None else bias[part])
                )
        else:
            self._multiply = ROUTES[self.route](weight.contiguous(), scales.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in] to [..., out] in the dtype of ``x``."""
        out = self.product(*quantise(x.reshape(-1, self.in_features)))
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def product(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Multiply what ``quantise`` returned: float32 [rows, out]."""
        if self.tiles:
            return torch.cat([tile.product(values, scales) for tile in self.tiles], dim=-1)
        out = self._multiply(values)
        out.mul_(scales)
        return out if self._bias is None else out.add_(self._bias)


class _Amx:
    """The product on CPUs with AMX, through oneDNN."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._weight = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self._product(values, 0)

    def _product(self, values: torch.Tensor, zero: int) -> torch.Tensor:
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, zero, self._weight, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out


class _Vnni(_Amx):
    """The product on CPUs with VNNI, through oneDNN.

    VNNI wants one unsigned side: x + 128, which oneDNN takes back as a zero point, in integers. On AMX it does that in
    float32, where sums above 2^24 lose their last bit: there the signed product is the exact one.
    """

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self._product(torch.bitwise_xor(values, -128).view(torch.uint8), 128)


class _IntMm:
    """The product on GPUs with int8 tensor cores, through cuBLAS."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._weight, self._scales = weight.t(), scales

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        # cuBLAS wants more than 16 rows, in eights.
        rows = values.shape[0]
        padded = F.pad(values, (0, 0, 0, max(24, -(-rows // 8) * 8) - rows))
        return torch._int_mm(padded, self._weight)[:rows].float() * self._scales


class _Exact:
    """The product on any device, slower than float32: what the others are checked against."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._weight, self._scales = weight, scales

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return exact_product(values, self._weight) * self._scales


#: How int8 products can run, the fastest first, and on which devices.
ROUTES: dict[str, type[_Amx] | type[_IntMm] | type[_Exact]] = {
    "amx": _Amx,
    "vnni": _Vnni,
    "int_mm": _IntMm,
    "exact": _Exact,
}
_DEVICES = {"amx": "cpu", "vnni": "cpu", "int_mm": "cuda"}
#: A route that takes so many times longer than the exact product is emulated: on CPUs without AMX, oneDNN multiplies
#: signed values in a reference loop, a thousand times slower. All routes yield the same bits, so a clock may choose.
EMULATED = 10.0


def quantise(x: torch.Tensor, spend: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values [rows, in] and float32 scales [rows, 1] with x about values * scales.

    A row with a NaN or an infinity gets such a scale, so that what comes of it is not finite either. ``spend``: x may
    be overwritten.
    """
    wide = x.float()
    largest = torch.maximum(wide.amax(-1, keepdim=True), wide.amin(-1, keepdim=True).neg_())
    factor = 127.0 / largest.clamp_min(1e-30)
    values = wide.mul_(factor) if spend or wide is not x else wide * factor
    return values.round_().to(torch.int8), largest / 127.0


def exact_product(values: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """``values @ integers.T`` of int8 matrices as float32, each slice of terms summed exactly: slow, for any device."""
    out = torch.zeros(values.shape[0], integers.shape[0], dtype=torch.float64, device=values.device)
    for start in range(0, values.shape[1], EXACT_TERMS):
        part = slice(start, start + EXACT_TERMS)
        out += values[:, part].float() @ integers[:, part].float().t()
    return out.float()


def opened(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return what multiplies many rows fastest: a layer that can make a dense kernel of itself does, others stay."""
    dense: Callable[[torch.dtype], torch.nn.Module] | None = getattr(layer, "dense", None)
    return layer if dense is None else dense(dtype)


def rounds_inputs(layer: torch.nn.Module) -> bool:
    """Whether a layer rounds its inputs to int8, so that a last bit of them may become a whole step."""
    return isinstance(layer, Int8Linear) or bool(getattr(layer, "dynamic", False))


def tiles_of(kernel: torch.nn.Module) -> list[torch.nn.Module]:
    """Cut a linear layer into kernels of at most ``TILE`` outputs each, in order; unknown layers stay whole."""
    if isinstance(kernel, Int8Linear):
        return list(kernel.tiles) or [kernel]
    cut: Callable[[int], list[torch.nn.Module]] | None = getattr(kernel, "tiles", None)
    if cut is not None:
        return cut(TILE)
    if not isinstance(kernel, torch.nn.Linear):
        return [kernel]
    parts = []
    for start in range(0, kernel.out_features, TILE):
        part = slice(start, start + TILE)
        parts.append(linear(kernel.weight[part], None if kernel.bias is None else kernel.bias[part]))
    return parts


class _Plain(torch.nn.Module):
    """``F.linear`` over a slice of another layer's weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight, self._bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """Return the fastest kernel that computes in the weight's own dtype."""
    if packs(weight.device.type, weight.dtype):
        return PackedLinear(weight, bias)
    return _Plain(weight, bias)


Choice = Callable[[str, torch.nn.Linear], "torch.nn.Module | None"]


def replace(module: torch.nn.Module, choose: Choice) -> int:
    """Put ``choose(name, layer)`` where each ``nn.Linear`` stands; None leaves it. Returns how many were replaced.

    The layer's weights are free to go as soon as it is replaced, so that no second copy of the model exists.
    """
    count = 0
    names = [name for name, layer in module.named_modules() if type(layer) is torch.nn.Linear]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        kernel = choose(name, getattr(owner, leaf))
        if kernel is not None:
            setattr(owner, leaf, kernel)
            count += 1
    return count


# ---------------------------------------------------------------- what works here


@cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product exists here for ``dtype`` and equals the plain one on random numbers."""
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    x, weight, bias, other = (torch.randn(shape, generator=_seeded()).to(dtype) for shape in _SHAPES)
    try:
        with torch.inference_mode():
            kernel = PackedLinear(weight, bias)
            exact = F.linear(x.double(), weight.double(), bias.double())
            pairs = [
                (kernel(x), exact),
                (kernel.activated(x, "silu"), F.silu(exact)),
                (kernel.activated(x, "gelu_pytorch_tanh"), F.gelu(exact, approximate="tanh")),
                (kernel.times(x, other), exact * other.double()),
                (kernel.plus(x, other), exact + other.double()),
            ]
    except (RuntimeError, AttributeError):
        return False  # a torch without these operators: the plain product serves
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    return all(_close(got, expected, tolerance) for got, expected in pairs)


@cache
def int8_route(device: str) -> str:
    """The key of ``ROUTES`` for a device type: the first that is right to the last bit, at the extremes too."""
    values, weight = (torch.randint(-127, 128, shape, generator=_seeded(), dtype=torch.int8) for shape in _INT8_SHAPES)
    values[0], weight[0], weight[1] = 127, 127, -127
    scales = torch.ones(len(weight))
    expected, bound = exact_product(values, weight), _seconds(lambda: exact_product(values, weight)) * EMULATED
    for name, route in ROUTES.items():
        if _DEVICES.get(name) != device:
            continue
        try:
            with torch.inference_mode():
                product, given = route(weight.to(device), scales.to(device)), values.to(device)
                right = torch.equal(product(given).cpu(), expected)
                emulated = right and device == "cpu" and _seconds(lambda: product(given)) > bound  # noqa: B023
        except (RuntimeError, AttributeError):
            continue  # this torch, or this chip, has no such product
        if right and not emulated:
            return name
    return "exact"


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of three runs: what disturbs a run only makes it longer."""
    found = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def check_int8(device: torch.device) -> None:
    """Refuse int8 where it could only be emulated. Raises ``PrecisionUnsupported``."""
    if int8_route(device.type) == "exact":
        raise PrecisionUnsupported(
            f"{device} has no int8 products that pass their self-test (CPU: VNNI or AMX; GPU: tensor cores), and "
            "emulated ones are slower than fp32; write precision: bf16 or fp32"
        )


_SHAPES = ((48, 96), (80, 96), (80,), (48, 80))
#: So many terms that sums pass 2^24.
_INT8_SHAPES = ((48, 1536), (80, 1536))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected).abs().max() <= tolerance * expected.abs().max())
