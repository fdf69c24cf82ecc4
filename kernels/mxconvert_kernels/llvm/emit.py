"""A thin language over llvmlite's IR builder, so that kernels read like the arithmetic they do.

A `Value` is a scalar or a vector in a register; operators on it emit instructions. Python numbers
mix in freely and become constants of the other operand's type, in every lane. Integers have no
sign of their own: `>>` shifts in zeros, and where sign matters the method's name tells (`s` or
`u`). Nothing here can trap or depends on floating-point modes, except the float operations named
`f...`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from llvmlite import ir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

I1: Final = ir.IntType(1)
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()
POINTER: Final = ir.PointerType()


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """The type of `lanes` elements in one value."""
    return ir.VectorType(element, lanes)


class Value:
    """A scalar or vector of integers or floats within a function under construction."""

    __slots__ = ("_emitter", "raw")

    def __init__(self, emitter: Emitter, raw: ir.Value) -> None:
        self._emitter = emitter
        self.raw = raw

    @property
    def type(self) -> ir.Type:
        """The LLVM type."""
        return self.raw.type

    def __add__(self, other: Operand) -> Value:
        return self._binary("add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._binary("sub", other)

    def __rsub__(self, other: float) -> Value:
        return Value(self._emitter, self._emitter.coerce(other, self.type)) - self

    def __mul__(self, other: Operand) -> Value:
        return self._binary("mul", other)

    def __and__(self, other: Operand) -> Value:
        return self._binary("and_", other)

    def __or__(self, other: Operand) -> Value:
        return self._binary("or_", other)

    def __xor__(self, other: Operand) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Operand) -> Value:
        return self._binary("lshr", other)

    def ashr(self, other: Operand) -> Value:
        """Shift right, repeating the sign bit."""
        return self._binary("ashr", other)

    def fmul(self, other: Operand) -> Value:
        """Multiply floats."""
        return self._binary("fmul", other)

    def fadd(self, other: Operand) -> Value:
        """Add floats."""
        return self._binary("fadd", other)

    def fsub(self, other: Operand) -> Value:
        """Subtract floats."""
        return self._binary("fsub", other)

    def fmuladd(self, factor: Value, term: Value) -> Value:
        """Multiply floats and add, rounding once or twice, whichever is faster."""
        return self._intrinsic("fmuladd", factor, term)

    def compare(self, relation: str, other: Operand) -> Value:
        """Compare integers: `==`, or unsigned `u<`, `u>=`, or signed `s<`, `s>` and so on."""
        raw = self._emitter.coerce(other, self.type)
        if relation == "==":
            result = self._emitter.builder.icmp_unsigned("==", self.raw, raw)
        elif relation.startswith("u"):
            result = self._emitter.builder.icmp_unsigned(relation[1:], self.raw, raw)
        else:
            result = self._emitter.builder.icmp_signed(relation[1:], self.raw, raw)
        return Value(self._emitter, result)

    def select(self, if_true: Value, if_false: Operand) -> Value:
        """Lane by lane one or the other, where `self` is a comparison's result."""
        raw = self._emitter.coerce(if_false, if_true.type)
        return Value(self._emitter, self._emitter.builder.select(self.raw, if_true.raw, raw))

    def umin(self, other: Operand) -> Value:
        """The smaller of unsigned integers."""
        return self._intrinsic("umin", other)

    def umax(self, other: Operand) -> Value:
        """The larger of unsigned integers."""
        return self._intrinsic("umax", other)

    def smin(self, other: Operand) -> Value:
        """The smaller of signed integers."""
        return self._intrinsic("smin", other)

    def smax(self, other: Operand) -> Value:
        """The larger of signed integers."""
        return self._intrinsic("smax", other)

    def usub_sat(self, other: Operand) -> Value:
        """Subtract unsigned integers, 0 where the difference would be negative."""
        return self._intrinsic("usub.sat", other)

    def reduce_umax(self) -> Value:
        """The largest lane of a vector of unsigned integers."""
        return self._reduce("umax")

    def reduce_add(self) -> Value:
        """The sum of all lanes of a vector of integers."""
        return self._reduce("add")

    def count_true(self) -> Value:
        """How many lanes of a comparison hold, i64."""
        bits = self.bitcast(ir.IntType(self.type.count))
        return bits._intrinsic("ctpop").resize(I64)  # noqa: SLF001  (its own class)

    def zext(self, element: ir.Type) -> Value:
        """Widen each lane with zeros."""
        return self._convert("zext", element)

    def sext(self, element: ir.Type) -> Value:
        """Widen each lane with its sign bit."""
        return self._convert("sext", element)

    def trunc(self, element: ir.Type) -> Value:
        """Keep the low bits of each lane."""
        return self._convert("trunc", element)

    def sitofp(self, element: ir.Type) -> Value:
        """Convert signed integers to floats."""
        return self._convert("sitofp", element)

    def fptrunc(self, element: ir.Type) -> Value:
        """Narrow floats, to nearest, ties to even."""
        return self._convert("fptrunc", element)

    def fpext(self, element: ir.Type) -> Value:
        """Widen floats."""
        return self._convert("fpext", element)

    def resize(self, element: ir.IntType) -> Value:
        """Widen each lane with zeros or keep its low bits, whichever `element` asks for."""
        width = _element(self.type).width
        if width == element.width:
            return self
        return self.zext(element) if width < element.width else self.trunc(element)

    def bitcast(self, target: ir.Type) -> Value:
        """The same bits as another type of the same size."""
        return Value(self._emitter, self._emitter.builder.bitcast(self.raw, target))

    def bitcast_lanes(self, element: ir.Type) -> Value:
        """The same bits, each lane as another type of the same width."""
        return self.bitcast(_like(self.type, element))

    def splat(self, lanes: int) -> Value:
        """A vector that holds this scalar in every lane."""
        builder = self._emitter.builder
        target = vector(self.type, lanes)
        undefined = ir.Constant(target, ir.Undefined)
        first = builder.insert_element(undefined, self.raw, I32(0))
        zeros = ir.Constant(vector(I32, lanes), [0] * lanes)
        return Value(self._emitter, builder.shuffle_vector(first, undefined, zeros))

    def lane(self, index: int) -> Value:
        """One lane of a vector."""
        return Value(self._emitter, self._emitter.builder.extract_element(self.raw, I32(index)))

    def lanes(self, indices: Sequence[int]) -> Value:
        """A vector of some lanes of this one."""
        return self.lanes_with(Value(self._emitter, ir.Constant(self.type, ir.Undefined)), indices)

    def lanes_with(self, other: Value, indices: Sequence[int]) -> Value:
        """A vector of some lanes of this one and, counting on, of another."""
        mask = ir.Constant(vector(I32, len(indices)), list(indices))
        shuffled = self._emitter.builder.shuffle_vector(self.raw, other.raw, mask)
        return Value(self._emitter, shuffled)

    def _binary(self, operation: str, other: Operand) -> Value:
        raw = self._emitter.coerce(other, self.type)
        return Value(self._emitter, getattr(self._emitter.builder, operation)(self.raw, raw))

    def _intrinsic(self, name: str, *others: Operand) -> Value:
        raws = [self.raw, *(self._emitter.coerce(other, self.type) for other in others)]
        function = self._emitter.declare(
            f"llvm.{name}.{_mangle(self.type)}", self.type, [self.type] * len(raws)
        )
        return Value(self._emitter, self._emitter.builder.call(function, raws))

    def _reduce(self, name: str) -> Value:
        function = self._emitter.declare(
            f"llvm.vector.reduce.{name}.{_mangle(self.type)}", self.type.element, [self.type]
        )
        return Value(self._emitter, self._emitter.builder.call(function, [self.raw]))

    def _convert(self, operation: str, element: ir.Type) -> Value:
        target = _like(self.type, element)
        return Value(self._emitter, getattr(self._emitter.builder, operation)(self.raw, target))


Operand: TypeAlias = Value | int | float


class Emitter:
    """Emits one function into a module of its own.

    Args:
        name: The function's name.
        parameters: LLVM types of its parameters; it returns an i64.
    """

    def __init__(self, name: str, parameters: Sequence[ir.Type]) -> None:
        self.module = ir.Module(name)
        signature = ir.FunctionType(I64, list(parameters))
        self._function = ir.Function(self.module, signature, name)
        for argument in self._function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        self.builder = ir.IRBuilder(self._function.append_basic_block("entry"))
        self._declared: dict[str, ir.Function] = {}

    @property
    def arguments(self) -> list[Value]:
        """The function's parameters."""
        return [Value(self, argument) for argument in self._function.args]

    def constant(self, kind: ir.Type, number: float) -> Value:
        """A number, in every lane if `kind` is a vector."""
        filler = [number] * kind.count if isinstance(kind, ir.VectorType) else number
        return Value(self, ir.Constant(kind, filler))

    def lanes(self, element: ir.IntType, numbers: Sequence[int]) -> Value:
        """A vector of integers."""
        return Value(self, ir.Constant(vector(element, len(numbers)), list(numbers)))

    def table(self, name: str, element: ir.IntType, rows: Sequence[Sequence[int]]) -> Value:
        """A pointer to constant rows of equal length, without gaps."""
        kind = ir.ArrayType(ir.ArrayType(element, len(rows[0])), len(rows))
        constant = ir.GlobalVariable(self.module, kind, name)
        constant.linkage = "private"
        constant.global_constant = True
        constant.initializer = ir.Constant(kind, [list(row) for row in rows])
        return Value(self, constant)

    def data(self, name: str, content: bytes) -> Value:
        """A pointer to constant bytes at a multiple of 64; their text is shorter than a table's."""
        kind = ir.ArrayType(I8, len(content))
        constant = ir.GlobalVariable(self.module, kind, name)
        constant.linkage = "private"
        constant.global_constant = True
        constant.align = 64
        constant.initializer = ir.Constant(kind, bytearray(content))
        return Value(self, constant)

    def stack(self, size_bytes: int) -> Value:
        """A pointer to memory of this call at a multiple of 64; ask for it before any loop."""
        memory = self.builder.alloca(ir.ArrayType(I8, size_bytes))
        memory.align = 64
        memory.type = POINTER
        return Value(self, memory)

    def coerce(self, operand: Operand, kind: ir.Type) -> ir.Value:
        """The operand itself, or a Python number as a constant of a type."""
        return operand.raw if isinstance(operand, Value) else self.constant(kind, operand).raw

    def load(self, pointer: Value, offset_bytes: Value, kind: ir.Type) -> Value:
        """Read from any address."""
        address = self.builder.gep(pointer.raw, [offset_bytes.raw], source_etype=I8)
        return Value(self, self.builder.load(address, align=1, typ=kind))

    def store(self, value: Value, pointer: Value, offset_bytes: Value) -> None:
        """Write to any address."""
        address = self.builder.gep(pointer.raw, [offset_bytes.raw], source_etype=I8)
        self.builder.store(value.raw, address, align=1)

    def loop(
        self,
        count: Value,
        initial: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Run `body(index, carried)` for index 0 ... count - 1; returns the last carried values."""
        before = self.builder.block
        head, inside, after = (
            self._function.append_basic_block(n) for n in ("loop", "body", "end")
        )
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(count.type)
        carried = [self.builder.phi(value.type) for value in initial]
        index.add_incoming(ir.Constant(count.type, 0), before)
        for phi, value in zip(carried, initial, strict=True):
            phi.add_incoming(value.raw, before)
        self.builder.cbranch(self.builder.icmp_unsigned("<", index, count.raw), inside, after)
        self.builder.position_at_end(inside)
        results = body(Value(self, index), [Value(self, phi) for phi in carried])
        following = self.builder.add(index, ir.Constant(count.type, 1))
        index.add_incoming(following, self.builder.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value.raw, self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(after)
        return [Value(self, phi) for phi in carried]

    def branch(
        self,
        condition: Value,
        if_true: Callable[[], Sequence[Value]],
        if_false: Callable[[], Sequence[Value]],
        *,
        likely: bool | None = None,
    ) -> list[Value]:
        """Run one of two ways to compute the same values.

        Args:
            condition: Which way to go.
            if_true: Emits the way taken if it holds.
            if_false: Emits the other way.
            likely: Whether it mostly holds, which lays the code out; None if that is a toss-up,
                which keeps LLVM from splitting the condition into several such branches.
        """
        arms = [self._function.append_basic_block(name) for name in ("yes", "no")]
        after = self._function.append_basic_block("joined")
        jump = self.builder.cbranch(condition.raw, *arms)
        if likely is None:
            jump.set_metadata("unpredictable", self.module.add_metadata([]))
        else:
            jump.set_weights([1000, 1] if likely else [1, 1000])
        outcomes = []
        for arm, compute in zip(arms, (if_true, if_false), strict=True):
            self.builder.position_at_end(arm)
            values = compute()
            outcomes.append((values, self.builder.block))
            self.builder.branch(after)
        self.builder.position_at_end(after)
        return [self._phi(column, outcomes) for column in range(len(outcomes[0][0]))]

    def finish(self, result: Value) -> str:
        """Return `result` from the function; gives the module's text."""
        self.builder.ret(result.raw)
        return str(self.module)

    def declare(self, name: str, result: ir.Type, parameters: Sequence[ir.Type]) -> ir.Function:
        """An intrinsic, declared once."""
        if name not in self._declared:
            signature = ir.FunctionType(result, list(parameters))
            self._declared[name] = ir.Function(self.module, signature, name)
        return self._declared[name]

    def _phi(self, column: int, outcomes: Sequence[tuple[Sequence[Value], ir.Block]]) -> Value:
        phi = self.builder.phi(outcomes[0][0][column].type)
        for values, block in outcomes:
            phi.add_incoming(values[column].raw, block)
        return Value(self, phi)


def _element(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """`element`, in as many lanes as `kind` has."""
    return vector(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _mangle(kind: ir.Type) -> str:
    """How intrinsics name a type: `i32`, `v32i16`, `v16f32`."""
    element = _element(kind)
    name = {F32: "f32", F64: "f64"}.get(element, str(element))
    return f"v{kind.count}{name}" if isinstance(kind, ir.VectorType) else name
