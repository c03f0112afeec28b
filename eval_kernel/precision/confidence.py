"""Per token, what calibrating confidence needs: losses at a grid of temperatures, confidence, and hit or miss."""

from __future__ import annotations

import torch

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.precision.temperature import BINS, NAMES, TEMPERATURES, bin_names, loss_name


def sums(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the losses of [positions, vocabulary] logits in float32, and the sums over those that are finite.

    Each token's value is rounded once to the grid, so the sums do not depend on how tokens are spread over shards.
    """
    logits = logits.float()
    wanted = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    scale = torch.logsumexp(logits, -1)
    losses = (scale - wanted).clamp_min(0.0)
    finite = torch.isfinite(losses)
    found = dict.fromkeys(NAMES, 0)
    for k, temperature in enumerate(TEMPERATURES):
        cooled = losses if temperature == 1.0 else torch.logsumexp(logits / temperature, -1) - wanted / temperature
        found[loss_name(k)] = _steps(cooled.clamp_min(0.0)[finite])
    top, guess = logits.max(-1)
    confidence = (top - scale).exp().clamp(0.0, 1.0)
    place = (confidence * BINS).to(torch.int64).clamp_max(BINS - 1)
    hit = guess == targets
    for b in range(BINS):
        inside = (place == b) & finite
        count, mass, hits = bin_names(b)
        found[count] = int(inside.sum())
        found[mass] = _steps(confidence[inside])
        found[hits] = int((hit & inside).sum())
    return losses, found


def _steps(values: torch.Tensor) -> int:
    return int(torch.round(values.double() * STEPS_PER_NAT).to(torch.int64).sum())
