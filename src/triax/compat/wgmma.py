"""Makes tensor cores finish reading registers before a loop writes to them again.

Hopper's `wgmma` may take its left operand from registers, and reads them while the program goes on.
In a loop that computes such an operand (weights that are widened in registers, for example) Triton
lets a product run on into the next iteration, and ptxas (CUDA 12.8 to 13.4, at least) reuses the
registers that the product still reads: results are silently wrong, now and then or always.

In: a kernel's PTX. Out: the same with waits at the loops that need them, which a dataflow over
basic blocks finds. Code that it cannot read is assumed to need a wait.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator

_NOT_CODE = re.compile(r'("[^"\n]*")|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_STATEMENT = re.compile(
    r"""(?P<label>[%$\w]+)\s*:(?!:)
    | (?P<brace>[{}])
    | \.branchtargets(?P<targets>[^;]*)
    | \.[^;{}\n]*  # any other directive
    | (?P<guard>@\s*!?\s*[%$\w]+\s+)?(?P<name>[a-z][\w.:]*)(?P<operands>[^;]*)""",
    re.VERBOSE,
)
_PRAGMA = re.compile(r"\s*\.pragma[^;]*;")  # of a loop; it must stay the first statement
_NAME = re.compile(r"(?<![%$\w])[%$A-Za-z_][%$\w]*")  # not a number
_MOVES_DATA = re.compile(r"ld\.(?!param)|ldmatrix|prmt\.|cvt\.(?![us]64\.[us]32)|call")
_WRITES_NO_DATA = re.compile(r"wgmma|setp|.*\.pred\b")
_FIRST = re.compile(r"\s*(\{[^}]*\}|[^,\[{]*)")
# The left operand follows the results: a descriptor, or registers in braces.
_OF_MEMORY = re.compile(r"\s*\{[^{}]*\}\s*,\s*[%$\w]")
_LEFT = re.compile(r"\s*\{[^{}]*\}\s*,\s*(\{[^{}]*\})")

# A product in flight is described by how many groups were committed after its own group: -1 until
# its own is. Fewer groups make it run longer, so of several products the least number counts.
_MOST_GROUPS = 8  # stands for more, too
_NOTHING_IN_FLIGHT = _MOST_GROUPS + 1
_NEVER_WRITTEN = -2
_ANYWHERE = 0  # the block that leads to every label, for branches whose target is not known


# Workaround: triton all, triton-lang/triton #9433: a product with an operand in registers runs on
# into the loop's next iteration, and ptxas does not keep the registers for it.
def drain_at_loops(ptx: str) -> str:
    """Returns PTX in which loops begin by waiting for products of registers that may still run.

    A loop gets a wait only if it writes data to registers, or multiplies from them, before a wait
    of its own. Loads to shared memory and products of one iteration still overlap. The time it
    takes is linear in the number of statements.
    """
    if "wgmma.mma_async" not in ptx:
        return ptx
    blank = lambda match: match[1] or re.sub(r"[^\n]", " ", match[0])
    statements = list(_STATEMENT.finditer(_NOT_CODE.sub(blank, ptx)))
    if not any(map(_is_of_registers, statements)):
        return ptx
    code = _Code(statements)
    parts, at = [], 0
    for head, younger in sorted(_to_drain(code).items()):
        end = code.blocks[head].at
        commit = "\n\twgmma.commit_group.sync.aligned;" if younger < 0 else ""
        parts += [ptx[at:end], commit, "\n\twgmma.wait_group.sync.aligned 0;"]
        at = end
    return "".join([*parts, ptx[at:]])


def _is_of_registers(statement: re.Match[str]) -> bool:
    if not (statement["name"] or "").startswith("wgmma.mma_async"):
        return False
    return _OF_MEMORY.match(statement["operands"]) is None


def _results(statement: re.Match[str]) -> list[str]:
    """The registers for data that an instruction writes: its first operand, if that is any.

    Addresses stand in brackets. Conditions have registers of their own, and tensor cores take care
    of their results.
    """
    if _WRITES_NO_DATA.match(statement["name"]):
        return []
    first = _FIRST.match(statement["operands"])
    return _NAME.findall(first[0]) if first else []


def _registers_of_operands(statements: Iterable[re.Match[str]]) -> set[str]:
    """Returns the products' operands in registers, and all that they are computed from.

    Not beyond loads from memory: addresses are no data.
    """
    sources = collections.defaultdict[str, list[str]](list)
    todo = list[str]()
    for statement in statements:
        name, operands = statement["name"] or "", statement["operands"] or ""
        if _is_of_registers(statement):
            left = _LEFT.match(operands)
            todo += _NAME.findall(left[1] if left else operands)
        elif name and "[" not in operands:
            registers = _NAME.findall(operands)
            for result in _results(statement):
                sources[result] += registers
    reached = set[str]()
    while todo:
        if (register := todo.pop()) not in reached:
            reached.add(register)
            todo += sources[register]
    return reached


@dataclasses.dataclass
class _Block:
    """Statements that run one after the other.

    `at` is where a wait can be put before them. `steps` are those that matter: "product", of
    registers; "write", of data to registers; "commit"; the number of a wait.
    """

    at: int = 0
    steps: list[str | int] = dataclasses.field(default_factory=list)
    next: list[int] = dataclasses.field(default_factory=list)
    previous: list[int] = dataclasses.field(default_factory=list)

    def in_flight(self, younger: int) -> int:
        """Returns how many groups follow the latest product in flight, at the block's end.

        `younger` is that number at its begin.
        """
        for step in self.steps:
            if step == "product":
                younger = -1
            elif step == "commit":
                younger += younger < _MOST_GROUPS
            elif isinstance(step, int) and younger >= step:
                younger = _NOTHING_IN_FLIGHT
        return younger

    def written(self, younger: int) -> int:
        """Returns the most groups that a product may be followed by and still run at a write.

        The number is for the block's begin; `younger` is that for its end.
        """
        for step in reversed(self.steps):
            if step in ("product", "write"):
                younger = _MOST_GROUPS
            elif step == "commit":
                younger -= _NEVER_WRITTEN < younger < _MOST_GROUPS
            elif isinstance(step, int):
                younger = min(younger, step - 1)
        return younger


class _Code:
    """The basic blocks of a kernel, and the blocks where loops begin, its `heads`."""

    def __init__(self, statements: list[re.Match[str]]):
        self.blocks = [_Block(), _Block()]
        self._scopes = [0]  # each one's parent: inline assembly may give its labels any names
        self._labels: dict[tuple[int, str], int] = {}
        self._tables: dict[int, list[str]] = {}  # of `brx.idx`, by the block with its label
        self._branches: list[tuple[int, int, str, str]] = []
        self._read(statements)
        labelled = sorted(self._labels.values())
        self.blocks[_ANYWHERE].next = labelled
        for at, scope, opcode, target in self._branches:
            self.blocks[at].next += self._targets(scope, opcode, target)
        for at, block in enumerate(self.blocks):
            for to in block.next:
                self.blocks[to].previous.append(at)
        self.heads = self._find_heads()
        if self.blocks[_ANYWHERE].previous:
            self.heads = {*self.heads, *labelled} - {_ANYWHERE}

    def _read(self, statements: list[re.Match[str]]) -> None:
        data, scope = _registers_of_operands(statements), 0
        for statement in statements:
            name = statement["name"] or ""
            opcode = name.partition(".")[0]
            if statement["brace"] == "{":
                self._scopes.append(scope)
                scope = len(self._scopes) - 1
            elif statement["brace"]:
                scope = self._scopes[scope]
            elif statement["label"]:
                self._begin(statement.end(), falls_through=True)
                pragma = _PRAGMA.match(statement.string, statement.end())
                self.blocks[-1].at = (pragma or statement).end()
                self._labels[scope, statement["label"]] = len(self.blocks) - 1
            elif statement["targets"]:
                names = _NAME.findall(statement["targets"])
                self._tables[len(self.blocks) - 1] = names
            elif opcode in ("bra", "brx", "ret", "exit", "trap"):
                if opcode in ("bra", "brx"):
                    target = statement["operands"].split(",")[-1].strip()
                    self._branches.append((len(self.blocks) - 1, scope, opcode, target))
                self._begin(statement.end(), falls_through=bool(statement["guard"]))
            elif name:
                self.blocks[-1].steps += self._steps(statement, data)

    def _begin(self, at: int, falls_through: bool) -> None:
        if falls_through:
            self.blocks[-1].next.append(len(self.blocks))
        self.blocks.append(_Block(at))

    def _steps(self, statement: re.Match[str], data: set[str]) -> Iterator[str | int]:
        name = statement["name"]
        if name.startswith("wgmma"):
            if _is_of_registers(statement):
                yield "product"
            elif statement["guard"]:
                return  # one that may not run ends no group and waits for none
            elif name.startswith("wgmma.commit_group"):
                yield "commit"
            elif name.startswith("wgmma.wait_group") and statement["operands"].strip().isdecimal():
                yield int(statement["operands"])
        elif _MOVES_DATA.match(name) or not data.isdisjoint(_results(statement)):
            yield "write"

    def _targets(self, scope: int, opcode: str, target: str) -> list[int]:
        names = [target]
        if opcode == "brx":
            names = self._tables.get(self._labelled(scope, target), [""])
        return [self._labelled(scope, name) for name in names]

    def _labelled(self, scope: int, name: str) -> int:
        while scope and (scope, name) not in self._labels:
            scope = self._scopes[scope]
        return self._labels.get((scope, name), _ANYWHERE)

    def _find_heads(self) -> set[int]:
        """Returns the blocks that a depth-first search finds again on its current path."""
        heads, seen, path = set(), set[int](), set[int]()
        for start in range(1, len(self.blocks)):
            todo = [(start, iter([start]))]
            while todo:
                at, ways = todo[-1]
                if (to := next(ways, None)) is None:
                    path.discard(at)
                    todo.pop()
                elif to in path:
                    heads.add(to)
                elif to not in seen:
                    seen.add(to)
                    path.add(to)
                    todo.append((to, iter(self.blocks[to].next)))
        return heads


def _to_drain(code: _Code) -> dict[int, int]:
    """Returns the heads that need a wait: no product from before a loop then runs at its writes.

    For each it returns how many groups follow the latest product that arrives there.

    At first all heads wait. Then, from the last to the first, a head loses its wait if no product
    that arrives there would still run at a write; in this order outer loops keep their waits rather
    than inner ones. A lost wait only lets products run longer, so each block is looked at again a
    few times in all.
    """
    drained = set(code.heads)
    arrives = [_NOTHING_IN_FLIGHT] * len(code.blocks)  # at a block's begin, before its wait
    written = [_NEVER_WRITTEN] * len(code.blocks)  # after a block's end

    def go_on(todo: list[int]) -> None:
        while todo:
            at = todo.pop()
            before = _NOTHING_IN_FLIGHT if at in drained else arrives[at]
            after = code.blocks[at].in_flight(before)
            for to in code.blocks[at].next:
                if after < arrives[to]:
                    arrives[to] = after
                    todo.append(to)

    def go_back(todo: list[int]) -> None:
        while todo:
            at = todo.pop()
            before = code.blocks[at].written(written[at])
            for to in code.blocks[at].previous if at not in drained else ():
                if before > written[to]:
                    written[to] = before
                    todo.append(to)

    go_on(list(range(len(code.blocks))))
    go_back(list(range(len(code.blocks))))
    for head in sorted(code.heads, reverse=True):
        if arrives[head] > code.blocks[head].written(written[head]):
            drained.remove(head)
            go_on([head])
            go_back([head])
    return {head: arrives[head] for head in drained}
