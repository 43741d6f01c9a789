"""Finds the operands that a compiled kernel may write to, in Triton's intermediate code.

In: the IR module that Triton's compiler wrote. Out: for every write, the pointer parameters whose
memory it may reach. A pointer is traced back to every value that it is computed from, through
arithmetic, selects, loops, branches and calls. A value loaded from memory has no origin.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any

# These write through their first operand.
_WRITES = re.compile(
    r"tt\.(store|atomic_(store|rmw|cas)|descriptor_(store|reduce|scatter))"
    r"|ttng\.async_tma_(copy_local_to_global|reduce|scatter)"
)
# These write nothing, and their results are values read from memory.
_READS = re.compile(
    r"tt\.(load|atomic_(load|poll)|descriptor_(load|gather)|assert|print)"
    r"|ttg\.(async_copy_global_to_local|local_load)"
    r"|ttng\.(async_tma_(copy_global_to_local|gather)|tensormap_fenceproxy_acquire|tmem_load)"
)
# Code that Triton cannot look into: it may write through any operand, unless marked as pure.
_FOREIGN = ("tt.elementwise_inline_asm", "tt.extern_elementwise", "ttg.inline_asm")
_ENDS = (".yield", "_yield", ".return", "_return", ".condition")
_POINTERS = ("!tt.ptr", "!tt.tensordesc", "!ttng.tensordesc")


def origins(module: Any) -> tuple[int, list[tuple[int, ...]]]:
    """Counts a kernel's pointers and descriptors, and finds the ones that each write may reach."""
    operations: list[Any] = []
    module.walk(operations.append)
    flow = _Flow(operations)
    kernel = module.get_function(module.get_entry_func_name())
    arguments = [kernel.args(i) for i in range(kernel.get_num_args())]
    pointers = [a.id() for a in arguments if str(a.get_type()).startswith(_POINTERS)]
    reached = {tuple(i for i, p in enumerate(pointers) if p in seen) for seen in flow.written()}
    return len(pointers), sorted(reached - {()})


class _Flow:
    """The data flow of a module: for each value, the values it may be or is computed from.

    Values, blocks and regions are kept as ids. Triton's bindings do not give the target of a jump.
    `operations` has each operation after the operations in its regions.
    """

    def __init__(self, operations: Sequence[Any]) -> None:
        self._sources: dict[int, list[int]] = collections.defaultdict(list)
        self._written: list[int] = []
        # For each region: the arguments of its blocks, the entry block first; the operands of each
        # of its terminators; the regions of its operations that have no operands. For each jump:
        # its region, whether it is conditional, and its operands.
        self._blocks: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
        self._ends: dict[int, list[list[int]]] = collections.defaultdict(list)
        self._jumps: list[tuple[int, bool, list[int]]] = []
        self._grouped: dict[int, list[int]] = collections.defaultdict(list)
        self._functions: dict[str, int] = {}
        self._calls: list[tuple[str, list[int], list[int]]] = []
        self._add(operations)

    def written(self) -> list[set[int]]:
        """For each write, all values that its pointer comes from; to be called once."""
        for name, operands, results in self._calls:
            self._run(self._functions[name], operands, results)
        for region, is_choice, values in self._jumps:
            for block in list(self._blocks[region].values())[1:]:
                size = len(block)
                if size == len(values) or (is_choice and size < len(values)):
                    self._hand_on(values[:size], block)
                    self._hand_on(values[len(values) - size :], block)
        return [self._reached(value) for value in self._written]

    def _add(self, operations: Sequence[Any]) -> None:
        for op in operations:
            name, block = op.get_name(), op.get_block()
            if block is None:  # the module
                continue
            operands = [op.get_operand(i).id() for i in range(op.get_num_operands())]
            results = [op.get_result(i).id() for i in range(op.get_num_results())]
            bodies = [op.get_region(i).id() for i in range(op.get_num_regions())]
            around = block.get_parent().id()
            arguments = [block.arg(i).id() for i in range(block.get_num_arguments())]
            self._blocks[around].setdefault(block.id(), arguments)
            if _WRITES.fullmatch(name):
                self._written.append(operands[0])
            elif _READS.fullmatch(name):
                pass
            elif name.startswith("cf."):
                is_choice = name == "cf.cond_br"
                self._jumps.append((around, is_choice, operands[is_choice:]))
            elif name.endswith(_ENDS):
                self._ends[around].append(operands[name == "scf.condition" :])
            elif name == "tt.addptr":
                self._mix(operands[:1], results)
            elif name == "arith.select":
                self._mix(operands[1:], results)
            elif name == "ttng.tensormap_create":  # stores an address through its first operand
                self._mix(operands[1:2], operands[:1])
            elif name == "tt.call":
                self._calls.append((op.get_flat_symbol_ref_attr("callee"), operands, results))
            elif name == "tt.func":
                self._functions[op.get_str_attr("sym_name")] = bodies[0]
            elif name == "scf.for":  # its first operands are bounds and step; it may not run at all
                carried = self._entry(bodies[0])[1:]
                self._hand_on(operands[3:], carried)
                self._run(bodies[0], [], carried)
                self._hand_on(carried, results)
            elif name == "scf.while":
                self._run(bodies[0], operands, results)
                self._run(bodies[1], results, self._entry(bodies[0]))
            elif bodies:
                if not operands:
                    self._grouped[around] += bodies
                for body in [*bodies, *(g for b in bodies for g in self._grouped[b])]:
                    self._run(body, operands, results)
            else:
                for result in results:
                    self._sources[result] += operands
                is_foreign = name in _FOREIGN and not op.get_bool_attr("pure")
                if is_foreign or not results:
                    self._written += operands

    def _reached(self, value: int) -> set[int]:
        pending, seen = [value], {value}
        while pending:
            new = set(self._sources[pending.pop()]) - seen
            seen |= new
            pending += new
        return seen

    def _entry(self, region: int) -> list[int]:
        return next(iter(self._blocks[region].values()), [])

    def _run(self, region: int, arguments: Sequence[int], results: Sequence[int]) -> None:
        """Hands values to a region's entry block, and its terminators' operands to `results`."""
        self._hand_on(arguments, self._entry(region))
        for values in self._ends[region]:
            self._hand_on(values, results)

    def _hand_on(self, values: Sequence[int], targets: Sequence[int]) -> None:
        """Makes each value the source of one target, or of all targets if the counts differ."""
        if len(values) != len(targets):
            self._mix(values, targets)
            return
        for value, target in zip(values, targets, strict=True):
            self._sources[target].append(value)

    def _mix(self, values: Sequence[int], targets: Sequence[int]) -> None:
        for target in targets:
            self._sources[target] += values
