"""Makes tensor cores finish reading registers before a loop writes to them again.

Hopper's `wgmma` may take its left operand from registers, and reads them while the program goes on.
In a loop that makes such an operand (rows times weights that are widened in registers, say) Triton
lets a product run on into the next iteration, and ptxas (of CUDA 12.8 to 13.4, at least) reuses the
registers that the product still reads: results are silently wrong, now and then or always.
"""

from __future__ import annotations

import re

_PRODUCT = "wgmma.mma_async"
# The left operand follows the results: registers in braces, or a descriptor.
_OF_REGISTERS = re.compile(r"wgmma\.mma_async\S*\s*\{[^}]*\}\s*,\s*\{")
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)")
_LABEL = re.compile(r"(\$L\w+):")
_BRANCH = re.compile(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L\w+)")
_END = re.compile(r"\s*(?:ret|exit|trap)\b")


# Workaround: triton all, triton-lang/triton #9433: a product with an operand in registers runs on
# into the loop's next iteration, and ptxas does not keep the registers for it.
def drain_at_loops(ptx: str) -> str:
    """Inserts a wait for products at the head of loops whose first product reads registers.

    Only loops whose products may still run at the loop's end get a wait. Prefetches still overlap,
    and so do the products of one iteration.
    """
    if _OF_REGISTERS.search(ptx) is None:
        return ptx
    lines = ptx.splitlines(keepends=True)
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    heads = set()
    for at, line in enumerate(lines):
        if (wait := _WAIT.search(line)) is not None and wait[1] != "0":
            heads |= {head for head in _ways_on(lines, labels, at)[0] if head <= at}
    for head in sorted(heads, reverse=True):
        if any(_OF_REGISTERS.search(lines[at]) for at in _ways_on(lines, labels, head)[1]):
            lines.insert(head + 1, "\twgmma.wait_group.sync.aligned 0;\n")
    return "".join(lines)


def _ways_on(lines: list[str], labels: dict[str, int], start: int) -> tuple[set[int], set[int]]:
    """Follows the code from line `start` to the next products; returns branch targets, products."""
    branched, products, seen, todo = set(), set(), set(), [start + 1]
    while todo:
        for at in range(todo.pop(), len(lines)):
            if at in seen or _END.match(lines[at]):
                break
            seen.add(at)
            if _PRODUCT in lines[at]:
                products.add(at)
                break
            if (branch := _BRANCH.search(lines[at])) is not None:
                target = labels[branch[2]]
                branched.add(target)
                todo.append(target)
                if branch[1] is None:
                    break
    return branched, products
