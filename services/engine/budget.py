"""How a step's prefill tokens are shared among prompts."""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(wants: Sequence[int], budget: int, longest: int = 0) -> list[int]:
    """Tokens for each prompt, in order of rank.

    The first gets at least half (rounded up) of the budget, or all it wants. The other half is open to later ones that
    end within it, so a short prompt does not wait for a long one before it, and the long one at most takes twice as
    long. What is left over goes by rank.

    Args:
        wants: tokens that each prompt still has to compute, all positive.
        longest: most that one prompt gets; 0: no limit.
    Returns:
        a grant for each, none above its want or ``longest``; their sum is the budget, or all that may be granted.
    """
    grants = [0] * len(wants)
    if not wants or budget < 1:
        return grants
    caps = [min(want, longest) for want in wants] if longest else wants
    grants[0] = min(caps[0], budget - budget // 2)
    left = budget - grants[0]
    for i in range(1, len(wants)):
        if wants[i] <= min(left, caps[i]):
            grants[i] = wants[i]
            left -= wants[i]
    for i, most in enumerate(caps):
        more = min(most - grants[i], left)
        grants[i] += more
        left -= more
    return grants
