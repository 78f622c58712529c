r"""Formulas in the labels of figures, written once between dollar signs as Matplotlib reads them: ``$\|I - GH\|_F$``.

Matplotlib sets them itself. For Plotly they become the little HTML that it knows; where only plain letters can be
shown, such as in a legend or a screen reader's text, they become letters with Unicode's own indices.
"""

from __future__ import annotations

import re

_SYMBOLS = {
    "alpha": "α", "beta": "β", "epsilon": "ε", "theta": "θ", "lambda": "λ", "sigma": "σ", "eta": "η", "kappa": "κ",
    "infty": "∞", "times": "×", "cdot": "·", "sqrt": "√", "sum": "∑", "|": "‖", ",": " ", "prime": "′", "geq": "≥",
}  # fmt: skip
_RAISED = dict(zip("0123456789+−-()nT", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁽⁾ⁿᵀ", strict=True))
_LOWERED = dict(zip("0123456789+−-()aeijknt", "₀₁₂₃₄₅₆₇₈₉₊₋₋₍₎ₐₑᵢⱼₖₙₜ", strict=True))
_FORMULA = re.compile(r"\$([^$]*)\$")
_PART = re.compile(
    r"\\mathrm\{(?P<roman>[^}]*)\}|\\(?P<symbol>[A-Za-z]+|[|,])|(?P<sign>[_^])(?:\{(?P<many>[^}]*)\}|(?P<one>.))"
)


def as_html(text: str) -> str:
    r"""A label for Plotly.

    >>> as_html(r"distance $\|B D^{-1}\|_F$")
    'distance ‖<i>B</i> <i>D</i><sup>−1</sup>‖<sub><i>F</i></sub>'
    """
    return _FORMULA.sub(lambda formula: _set(formula[1], html=True), text)


def as_text(text: str) -> str:
    r"""A label in plain letters.

    >>> as_text(r"$\sigma = \|I - GH\|_F / \sqrt{n}$"), as_text(r"$A_0$, $\alpha t$")
    ('σ = ‖I − GH‖_F / √n', 'A₀, α t')
    """
    return _FORMULA.sub(lambda formula: _set(formula[1], html=False), text)


def _set(formula: str, html: bool) -> str:
    """One formula; letters of HTML are slanted, but those of words are not."""
    made, end = "", 0
    for part in _PART.finditer(formula):
        made += _plain(formula[end : part.start()], html)
        end = part.end()
        if part["roman"] is not None:
            made += part["roman"]
        elif part["symbol"]:
            made += _SYMBOLS.get(part["symbol"], part["symbol"])
        else:
            made += _index(part["sign"], part["many"] or part["one"], html)
    return made + _plain(formula[end:], html)


def _plain(letters: str, html: bool) -> str:
    letters = letters.replace("-", "−").replace("{", "").replace("}", "").replace("'", "′")
    return re.sub(r"[A-Za-z]+", r"<i>\g<0></i>", letters) if html else letters


def _index(sign: str, inner: str, html: bool) -> str:
    if html:
        tag = "sup" if sign == "^" else "sub"
        return f"<{tag}>{_set(inner, html)}</{tag}>"
    text, known = _set(inner, html), _RAISED if sign == "^" else _LOWERED
    return "".join(map(known.__getitem__, text)) if set(text) <= known.keys() else f"{sign}{text}"
