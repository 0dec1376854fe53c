"""Letters for PNG files: three by five dots, capitals only, enough for labels and numbers.

A glyph is five rows of three dots, each row a digit 0..7: 4 is the left dot, 2 the middle one, 1 the right one.
"""

from __future__ import annotations

WIDTH, HEIGHT = 3, 5
_ROWS = {
    "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644",
    "G": "34553", "H": "55755", "I": "72227", "J": "11152", "K": "55655", "L": "44447",
    "M": "57755", "N": "65555", "O": "25552", "P": "65644", "Q": "25563", "R": "65655",
    "S": "34216", "T": "72222", "U": "55557", "V": "55552", "W": "55775", "X": "55255",
    "Y": "55222", "Z": "71247", "0": "75557", "1": "26227", "2": "71747", "3": "71317",
    "4": "55711", "5": "74717", "6": "74757", "7": "71222", "8": "75757", "9": "75717",
    ".": "00002", ",": "00024", ":": "02020", "-": "00700", "+": "02720", "=": "07070",
    "%": "51245", "/": "11244", "(": "12221", ")": "42224", "<": "12421", ">": "42124",
    "'": "22000", "_": "00007", "#": "57575", "*": "05250", ";": "02024", "?": "71202",
}  # fmt: skip
_BOX = (7, 5, 5, 5, 7)
GLYPHS = {letter: tuple(int(row) for row in rows) for letter, rows in _ROWS.items()}


def glyph(letter: str) -> tuple[int, ...]:
    """Return rows of dots; a space has none, an unknown letter is a box."""
    return (0,) * HEIGHT if letter == " " else GLYPHS.get(letter.upper(), _BOX)
