"""Makes tensor cores finish reading registers before a loop writes to them again.

Hopper's `wgmma` may take its left operand from registers, and reads them while the program goes on.
In a loop that computes such an operand (weights that are widened in registers, for example) Triton
lets a product run on into the next iteration, and ptxas (CUDA 12.8 to 13.4, at least) reuses the
registers that the product still reads: results are silently wrong, now and then or always.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# The left operand follows the results: registers in braces, or a descriptor.
_OF_REGISTERS = re.compile(r"wgmma\.mma_async[^{;]*\{[^}]*\}\s*,\s*\{")
_EVENT = re.compile(
    r"""//[^\n]*
    | (?P<label>[$\w]+):(?!:)
    | (?P<product>wgmma\.mma_async[^;]*;)
    | (?P<commit>wgmma\.commit_group)
    | wgmma\.wait_group\S*\s+(?P<wait>\d+)
    | (?P<condition>@!?[%$\w]+\s+)?\b(?:bra(?:\.uni)?\s+(?P<target>[$\w]+)|(?P<end>ret|exit|trap)\b)
    | (?P<data>\b(?:ld\.(?!param)|ldmatrix|prmt\.|cvt\.(?![us]64\.[us]32)))""",
    re.VERBOSE,
)
_PRAGMA = re.compile(r"\s*\.pragma[^;]*;")  # of a loop; it must stay the first statement
_MOST_GROUPS = 8
_State = tuple[int, int]


# Workaround: triton all, triton-lang/triton #9433: a product with an operand in registers runs on
# into the loop's next iteration, and ptxas does not keep the registers for it.
def drain_at_loops(ptx: str) -> str:
    """Returns PTX in which loops begin by waiting for products of registers that may still run.

    A loop gets a wait only if it writes data to registers, or multiplies from them, before a wait
    of its own. Loads to shared memory and products of one iteration still overlap.
    """
    if _OF_REGISTERS.search(ptx) is None:
        return ptx
    code = _Code(ptx)
    while to_drain := [head for head, younger in code.at_heads() if code.writes(head, younger)]:
        code.drained.add(min(to_drain))
    parts, at = [], 0
    for head in sorted(code.drained):
        end = code.events[head].end()
        if (pragma := _PRAGMA.match(ptx, end)) is not None:
            end = pragma.end()
        parts += [ptx[at:end], "\n\twgmma.wait_group.sync.aligned 0;"]
        at = end
    return "".join([*parts, ptx[at:]])


class _Code:
    """The statements of a kernel that matter to products in flight, and its control flow.

    `heads` are the statements where loops begin. The heads in `drained` wait for all products.
    """

    def __init__(self, ptx: str):
        self.events = [event for event in _EVENT.finditer(ptx) if event.lastgroup]
        self._labels: dict[str, list[int]] = {}
        for at, event in enumerate(self.events):
            if event["label"]:
                self._labels.setdefault(event["label"], []).append(at)
        self._next = [list(self._ways_on(at)) for at in range(len(self.events))]
        self.heads = self._find_heads()
        self.drained: set[int] = set()

    def _ways_on(self, at: int) -> Iterator[int]:
        event = self.events[at]
        if event["target"] in self._labels:  # the nearest: inline assembly has labels of its own
            yield min(self._labels[event["target"]], key=lambda label: abs(label - at))
        if event["condition"] or not (event["target"] or event["end"]):
            yield from range(at + 1, min(at + 2, len(self.events)))

    def _find_heads(self) -> set[int]:
        """Returns the statements that a depth-first search finds again on its current path."""
        heads, seen = set(), set[int]()
        for start in range(len(self.events)):
            if start in seen:
                continue
            seen.add(start)
            path, todo = {start}, [(start, iter(self._next[start]))]
            while todo:
                at, ways = todo[-1]
                if (to := next(ways, None)) is None:
                    path.remove(at)
                    todo.pop()
                elif to in path:
                    heads.add(to)
                elif to not in seen:
                    seen.add(to)
                    path.add(to)
                    todo.append((to, iter(self._next[to])))
        return heads

    def at_heads(self) -> set[_State]:
        """Returns heads where a product of registers may still run, and the groups since it."""
        products = [at for at, event in enumerate(self.events) if _is_of_registers(event)]
        states = self._in_flight([(to, -1) for at in products for to in self._next[at]])
        return {(at, younger) for at, younger in states if at in self.heads}

    def writes(self, head: int, younger: int) -> bool:
        """Whether data is written to registers, or multiplied from them, before a wait."""
        states = self._in_flight([(head, younger)])
        return any(self.events[at]["data"] or _is_of_registers(self.events[at]) for at, _ in states)

    def _in_flight(self, todo: list[_State]) -> set[_State]:
        """Returns the statements reached from `todo` before a wait for the product.

        Each has the number of groups that began after the product's group; -1 within that group.
        """
        seen = set[_State]()
        while todo:
            state = at, younger = todo.pop()
            event = self.events[at]
            waited = at in self.drained or (event["wait"] and younger >= int(event["wait"]))
            if state in seen or waited:
                continue
            seen.add(state)
            younger = min(younger + bool(event["commit"]), _MOST_GROUPS)
            todo += [(to, younger) for to in self._next[at]]
        return seen


def _is_of_registers(event: re.Match[str]) -> bool:
    return event["product"] is not None and _OF_REGISTERS.match(event["product"]) is not None
