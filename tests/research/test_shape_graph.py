"""The shape graph: equations solved against all points that satisfy them, rules against graphs at random points, the paper's listing."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at, size_at
from lowtide.ir.shapes.polynomial import Polynomial
from lowtide.ir.text.graph_text import parse, to_text
from research.shapes.compare import Comparison, compare
from research.shapes.shape_graph import shape_graph, simplified
from research.shapes.solve import Equation, solved
from tests.listing import listing
from tests.ranges import points

unhurried = settings(deadline=None, max_examples=100)
SYMBOLS = sympy.symbols("a b c d", integer=True, nonnegative=True)
A, B, C, D = SYMBOLS
SMALL = st.integers(1, 3)
TERMS = st.builds(lambda symbol, factor: factor * symbol, st.sampled_from(SYMBOLS), SMALL) | st.builds(
    lambda one, two, factor: factor * one * two, st.sampled_from(SYMBOLS), st.sampled_from(SYMBOLS), SMALL
)
SIDES = (
    TERMS
    | SMALL.map(sympy.Integer)
    | st.builds(lambda one, two: one + two, TERMS, TERMS)
    | st.sampled_from(SYMBOLS).map(lambda symbol: sympy.floor(symbol / 2))
)
PAIRS = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4)


@st.composite
def ranges(draw):
    leasts = [draw(st.integers(0, 2)) for _ in SYMBOLS]
    return tuple(Dimension(str(symbol), least, least + draw(st.integers(0, 4))) for symbol, least in zip(SYMBOLS, leasts, strict=True))


def holding(pairs, dimensions):
    """The points at which all equations hold."""
    return [point for point in points(dimensions) if all(number(one, point) == number(two, point) for one, two in pairs)]


def number(size, point):
    return sympy.sympify(size).subs({symbol: point[str(symbol)] for symbol in SYMBOLS})


@unhurried
@given(PAIRS, ranges())
def test_what_is_solved_holds_wherever_the_equations_do(pairs, dimensions):
    held = holding(pairs, dimensions)
    try:
        shapes = solved([Equation(one, two, "test") for one, two in pairs], dimensions)
    except ShapeError:
        assert not held
        return
    left = {each.name: each for each in shapes.dimensions}
    assert sorted([*left, *shapes.meanings]) == [each.name for each in dimensions]
    for point in held:
        assert all(each.least <= point[name] <= each.most for name, each in left.items())
        for symbol in SYMBOLS:
            meaning = shapes.simplified(symbol)
            assert number(meaning, point) == point[str(symbol)]
            assert {str(each) for each in sympy.sympify(meaning).free_symbols} <= left.keys()


@unhurried
@given(PAIRS, ranges())
def test_what_is_left_unsolved_says_all_that_is_missing(pairs, dimensions):
    """Over common dimensions, a point that keeps the unsolved equations and all ranges keeps every equation."""
    try:
        shapes = solved([Equation(one, two, "test") for one, two in pairs], dimensions)
    except ShapeError:
        return
    for point in points(shapes.dimensions):
        given = {symbol: number_over(shapes.simplified(symbol), point) for symbol in SYMBOLS}
        if all(each.first.subs(given) == each.second.subs(given) for each in shapes.unsolved):
            assert all(sympy.sympify(one).subs(given) == sympy.sympify(two).subs(given) for one, two in pairs)


def number_over(size, point):
    return sympy.sympify(size).subs({sympy.Symbol(name, integer=True, nonnegative=True): each for name, each in point.items()})


@unhurried
@given(st.permutations(range(4)), st.lists(SMALL, min_size=3, max_size=3), st.randoms(use_true_random=False))
def test_a_chain_of_multiples_leaves_one_dimension(order, factors, random):
    """Each is a multiple of the next, said in any order: one is left, and all are whole multiples of it."""
    pairs = [(SYMBOLS[one], factor * SYMBOLS[two]) for one, two, factor in zip(order, order[1:], factors, strict=False)]
    random.shuffle(pairs)
    dimensions = tuple(Dimension(str(symbol), 1, 10**6) for symbol in SYMBOLS)
    shapes = solved([Equation(one, two, "test") for one, two in pairs], dimensions)
    assert len(shapes.dimensions) == 1
    assert not shapes.unsolved


def test_a_product_waits_until_its_factor_is_known():
    dimensions = tuple(Dimension(str(symbol), 1, 4096) for symbol in SYMBOLS)
    flat = [Equation(A * B * 768, C * D, "view"), Equation(D, sympy.Integer(768), "mm")]
    shapes = solved(flat, dimensions)
    assert shapes.simplified(C) == A * B
    assert [each.name for each in shapes.dimensions] == ["a", "b"]
    assert solved(flat[:1], dimensions).unsolved == (flat[0],)


def test_ranges_are_narrowed():
    shapes = solved([Equation(A, 12 * B, "view")], (Dimension("a", 16, 100), Dimension("b", 1, 4096)))
    assert shapes.dimensions == (Dimension("b", 2, 8),)


def test_a_longer_chain_takes_no_longer_than_its_length():
    symbols = sympy.symbols("s:2000", integer=True, nonnegative=True)
    dimensions = tuple(Dimension(str(symbol), 1, 4096) for symbol in symbols)
    backwards = [Equation(symbols[place], symbols[place - 1], "add") for place in range(len(symbols) - 1, 0, -1)]
    shapes = solved(backwards, dimensions)
    assert [each.name for each in shapes.dimensions] == ["s0"]
    assert shapes.simplified(symbols[-1]) == symbols[0]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (12 * B, 12 * B + 5, r"node 3 \(aten.mm\): expected equal sizes, got 12\*b and 12\*b \+ 5"),
        (A, sympy.Integer(5), r"node 3 \(aten.mm\): a equals 5: expected a in 16..100, got 5"),
        (A, 200 * B, r"node 3 \(aten.mm\): a equals 200\*b: expected numbers for both a in 16..100 and b in 1..4096"),
    ],
)
def test_what_contradicts_is_refused(first, second, message):
    with pytest.raises(ShapeError, match=message):
        solved([Equation(first, second, "node 3 (aten.mm)")], (Dimension("a", 16, 100), Dimension("b", 1, 4096)))


def test_the_listing_has_one_dimension():
    """`@S0 = Mul @C12, @S1`, from the reshape."""
    shapes = shape_graph(listing())
    assert shapes.dimensions == (Dimension("S1", 1, 4096),)
    assert str(shapes.simplified(sympy.Symbol("S0"))) == "12*S1"


def test_the_listing_compares_after_simplification():
    """11008 * @S1 is less than 1024 * @S0: nobody can say so before, as the two are not tied."""
    graph = listing()
    s0, s1 = (each.symbol for each in graph.dimensions)
    assert compare(11008 * s1, 1024 * s0, graph.dimensions) is Comparison.UNKNOWN
    shapes = shape_graph(graph)
    first, second = shapes.simplified(11008 * s1), shapes.simplified(1024 * s0)
    assert compare(first, second, shapes.dimensions) is Comparison.AT_MOST
    assert second == 12288 * s1


def test_the_listing_with_one_dimension_is_the_same_graph():
    graph = listing()
    for number in (1, 7, 4096):
        assert to_text(at(simplified(graph), {"S1": number})) == to_text(at(graph, {"S0": 12 * number, "S1": number}))


BLOCK = """\
def graph(  # batch in 2..64, length in 16..512, n in 1..999, m in 1..999, k in 1..9, p in 2..999, q in 1..999, r in 2..99, c in 1..999
    x,  # float32[batch, length, 8] 32*batch*length B input cpu
    w,  # float32[8, 6] 192 B parameter cpu
    y,  # int64[q] 8*q B input cpu
):
    flat = aten.view.default(x, (size("n"), size("k")))  # float32[n, k] on x
    h = aten.mm.default(flat, w)  # float32[m, 6] 24*m B activation cpu
    g = aten.add.Tensor(h, h)  # float32[p, 6] 24*p B activation cpu
    back = aten.view.default(g, (size("r"), size("length"), 6))  # float32[r, length, 6] on g
    turned = aten.permute.default(back, (2, 0, 1))  # float32[6, r, length] on g
    joined = aten.cat.default((turned, turned), 2)  # float32[6, r, c] 24*c*r B activation cpu
    log = aten._log_softmax.default(g, 1, False)  # float32[p, 6] 24*p B activation cpu
    loss, weight = aten.nll_loss_forward.default(log, y)  # float32[] 4 B activation cpu; float32[] 4 B activation cpu
    return (loss, joined)
"""


def test_rules_of_a_block_leave_its_two_dimensions():
    shapes = shape_graph(parse(BLOCK))
    assert [each.name for each in shapes.dimensions] == ["batch", "length"]
    found = {name: str(meaning) for name, meaning in shapes.meanings.items()}
    product = "batch*length"
    assert found == {"k": "8", "n": product, "m": product, "p": product, "q": product, "r": "batch", "c": "2*length"}


@given(st.integers(2, 10), st.integers(16, 99))
@settings(deadline=None, max_examples=20)
def test_a_simplified_block_is_the_same_at_every_point(batch, length):
    graph = parse(BLOCK)
    shapes = shape_graph(graph)
    over = {"batch": batch, "length": length}
    whole = {each.name: size_at(shapes.simplified(each.symbol), shapes.dimensions, over) for each in graph.dimensions}
    assert to_text(at(simplified(graph), over)) == to_text(at(graph, whole))


def test_a_broadcast_extent_that_may_be_one_says_nothing():
    text = """\
def graph(  # s in {}..64, t in 2..64
    x,  # float32[s] 4*s B input cpu
    y,  # float32[t] 4*t B input cpu
):
    z = aten.add.Tensor(x, y)  # float32[t] 4*t B activation cpu
    return (z,)
"""
    assert not shape_graph(parse(text.format(1))).meanings
    assert shape_graph(parse(text.format(2))).meanings == {"t": Polynomial.of(sympy.Symbol("s"))}


def test_a_view_of_another_type_says_nothing_of_elements():
    text = """\
def graph(  # s in 1..64, t in 2..64
    x,  # float32[s] 4*s B input cpu
):
    z = aten.view.dtype(x, dtype("uint8"))  # uint8[t] on x
    return (z,)
"""
    assert not shape_graph(parse(text)).meanings
