import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import FormatError
from lowtide.ir.text.sizes import canonical, parse_size, size_text

S0, S1 = sympy.symbols("s0 s1", integer=True, nonnegative=True)
LEAVES = st.integers(0, 20).map(sympy.Integer) | st.sampled_from([S0, S1])
SIZES = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda a, b: a + b, inner, inner)
        | st.builds(lambda a, b: a * b, inner, inner)
        | st.builds(lambda a, b: a - b, inner, inner)
        | st.builds(lambda a, b: a // b, inner, st.integers(1, 9))
        | st.builds(lambda a, b: a**b, inner, st.integers(1, 3))
        | st.builds(sympy.Max, inner, inner)
        | st.builds(sympy.Min, inner, inner)
        | st.builds(sympy.Mod, inner, st.integers(1, 9))
    ),
    max_leaves=5,
)


@given(SIZES)
def test_text_reads_back_as_the_same_number_whatever_the_dimensions_are(size: sympy.Expr) -> None:
    text = size_text(size)
    again = parse_size(text)
    assert size_text(again) == text
    assert canonical(size) == again
    for values in ({S0: 3, S1: 4}, {S0: 0, S1: 7}):
        assert int(sympy.sympify(again).subs(values)) == int(size.subs(values))  # sympy may leave Min(1, 2) as it is


@given(st.integers(-(10**39), 10**39))
def test_integers_stay_integers(size: int) -> None:
    assert parse_size(size_text(size)) == size
    assert type(parse_size(size_text(size))) is int


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4*s0*s1**2", 4 * S0 * S1**2),
        ("s0//2", sympy.floor(S0 / 2)),
        ("floor(s0/2)", sympy.floor(S0 / 2)),
        ("Max(1, s0) - -2", sympy.Max(1, S0) + 2),
        ("2*(s0 + 1)", 2 * S0 + 2),
        ("Mod(s0, 3)", sympy.Mod(S0, 3)),
        ("-s0**2", -(S0**2)),
        ("2**3**2", 512),
        ("sympy.Integer(4)", None),
    ],
)
def test_grammar(text: str, size: sympy.Expr | None) -> None:
    if size is None:
        with pytest.raises(FormatError, match="expected a size, got"):
            parse_size(text)
    else:
        assert parse_size(text) == size


def test_assumptions_of_a_dimension_do_not_show() -> None:
    assert canonical(4 * sympy.Symbol("s0")) == canonical(4 * sympy.Symbol("s0", positive=True)) == 4 * S0


def test_a_dimension_may_be_zero() -> None:
    assert size_text(sympy.Max(1, sympy.Symbol("s0"))) == "Max(1, s0)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a size, got nothing"),
        ("s0 +", "expected a dimension or an integer of at most 40 digits, got the end"),
        ("a b", "expected the end, got b"),
        ("(s0", "expected '\\)', got the end"),
        ("1/0", "expected a divisor other than 0"),
        ("1//(s0 - s0)", "expected a divisor other than 0"),
        ("0**-1", "expected a power"),
        ("s0**s1", "expected a power that is an integer of at most 16"),
        ("9**9**9", "expected a power that is an integer of at most 16"),
        ("(9**16)**16*(9**16)**16", "expected numbers of at most 1024 bits"),
        ("9" * 41, "expected a dimension or an integer of at most 40 digits"),
        ("__import__(os)", "expected one of the functions Max, Min, Mod, floor, ceiling, got __import__"),
        ("Mod(s0)", "expected 2 arguments of Mod, got 1"),
        ("Mod(s0, 0)", "expected a divisor other than 0"),
        ("Max()", "expected a dimension"),
        ("(" * 55 + "1" + ")" * 55, "expected a size nested at most 50 deep"),
        ("+".join(["s0"] * 300), "expected a size of at most 250 symbols, got 599"),
        ("²", "expected a dimension"),
    ],
)
def test_what_is_no_size_is_refused(text: str, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        parse_size(text)


@pytest.mark.parametrize("size", [sympy.sin(S0), sympy.Float(1.5), sympy.oo, 2 * sympy.pi, 10**41, "4"])
def test_what_text_cannot_hold_is_refused(size: object) -> None:
    with pytest.raises(FormatError, match="expected"):
        size_text(size)  # type: ignore[arg-type]
