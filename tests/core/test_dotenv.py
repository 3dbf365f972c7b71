"""The grammar of `.env`, one input a row, and what holds for every input: no line is dropped and no
text of a broken line is shown."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzz_dotenv
from bwd.core.dotenv import MAX_BYTES, DotEnv, Entry, parse

# Inputs that are taken, and the pairs they give (the last of a duplicate counts).
TAKEN: list[tuple[str | bytes, dict[str, str]]] = [
    # nothing
    ("", {}),
    ("\n", {}),
    ("\r\n\r\n", {}),
    ("   \t ", {}),
    ("# comment", {}),
    ("   # comment with PORT=1 in it", {}),
    ("#", {}),
    ("# caf\u00e9 \u2026 \u201cquoted\u201d \u00a0", {}),
    ("\ufeff", {}),
    ("\ufeff# comment", {}),
    # plain
    ("PORT=8000", {"PORT": "8000"}),
    ("PORT=8000\n", {"PORT": "8000"}),
    ("PORT=8000\r\n", {"PORT": "8000"}),
    ("PORT=8000\rHOST=::1", {"PORT": "8000", "HOST": "::1"}),
    ("A=1\nB=2\r\nC=3\rD=4", {"A": "1", "B": "2", "C": "3", "D": "4"}),
    ("\ufeffMODEL_NAME=x\r\nPORT=8000\r\n", {"MODEL_NAME": "x", "PORT": "8000"}),
    ("  PORT=8000", {"PORT": "8000"}),
    ("\tPORT=8000\t", {"PORT": "8000"}),
    ("PORT = 8000", {"PORT": "8000"}),
    ("PORT\t=\t8000", {"PORT": "8000"}),
    ("export PORT=8000", {"PORT": "8000"}),
    ("export\tPORT = 8000", {"PORT": "8000"}),
    ("  export   PORT=8000", {"PORT": "8000"}),
    ("export=1", {"export": "1"}),
    ("exported=1", {"exported": "1"}),
    ("port=8000", {"port": "8000"}),
    ("_X=1", {"_X": "1"}),
    ("X1_y=1", {"X1_y": "1"}),
    ("A=x y  z", {"A": "x y  z"}),
    ("A=x y   ", {"A": "x y"}),
    ("A==x", {"A": "=x"}),
    ("A=b=c", {"A": "b=c"}),
    ("A=http://h:1/p?q=1&r=2", {"A": "http://h:1/p?q=1&r=2"}),
    ("A=1,2;3|4&5>6<7*8?9[0]!", {"A": "1,2;3|4&5>6<7*8?9[0]!"}),
    ("A=%2B%", {"A": "%2B%"}),
    ("A=\u00e9\u4e2d\U0001f600", {"A": "\u00e9\u4e2d\U0001f600"}),
    ('EXTRA={"a":1}', {"EXTRA": '{"a":1}'}),
    ("A=it's", {"A": "it's"}),
    ('A=5" disk', {"A": '5" disk'}),
    ("A=-x --y 'z w'", {"A": "-x --y 'z w'"}),
    ("A=a\\b", {"A": "a\\b"}),
    # empty
    ("A=", {"A": ""}),
    ("A= ", {"A": ""}),
    ("A=\t", {"A": ""}),
    ("A=''", {"A": ""}),
    ('A=""', {"A": ""}),
    ("A= # comment", {"A": ""}),
    ("A=\t# comment", {"A": ""}),
    ("export A=", {"A": ""}),
    # comments
    ("A=x # comment", {"A": "x"}),
    ("A=x\t# comment", {"A": "x"}),
    ("A=x    #", {"A": "x"}),
    ("A=x #a #b", {"A": "x"}),
    ("A=x#y", {"A": "x#y"}),
    ("A=x#y # z", {"A": "x#y"}),
    ("A=#x", {"A": "#x"}),
    ("A=x # \u00a0 \u200b typographic comment", {"A": "x"}),
    ("A='x # y'", {"A": "x # y"}),
    ('A="x # y" # z', {"A": "x # y"}),
    ("A='x'   # z", {"A": "x"}),
    ("A='x'\t#", {"A": "x"}),
    # quotes
    ("A='x y'", {"A": "x y"}),
    ('A="x y"', {"A": "x y"}),
    ("A='x'  ", {"A": "x"}),
    ("A='  x  '", {"A": "  x  "}),
    ("A='say \"hi\"'", {"A": 'say "hi"'}),
    ('A="it\'s"', {"A": "it's"}),
    ("A='\t'", {"A": "\t"}),
    ("A=\"'quoted'\"", {"A": "'quoted'"}),
    ('HF_TOKEN="hf_abc"', {"HF_TOKEN": "hf_abc"}),
    ("EXTRA='--c {\"a\": 1}'", {"EXTRA": '--c {"a": 1}'}),
    # literal: nothing is expanded, escaped or executed
    ("A=$HOME", {"A": "$HOME"}),
    ("A=${HOME}", {"A": "${HOME}"}),
    ("A='${HOME}'", {"A": "${HOME}"}),
    ('A="${HOME:-x}"', {"A": "${HOME:-x}"}),
    ("A=pa$$word", {"A": "pa$$word"}),
    ("A=$(touch /var/tmp/bwd-pwned)", {"A": "$(touch /var/tmp/bwd-pwned)"}),
    ("A=`id`", {"A": "`id`"}),
    ('A="; rm -rf x"', {"A": "; rm -rf x"}),
    ('P="C:\\new"', {"P": "C:\\new"}),
    ("P='C:\\'", {"P": "C:\\"}),
    ('P="a\\\\b"', {"P": "a\\\\b"}),
    ("A=~/x", {"A": "~/x"}),
    ("A=100%", {"A": "100%"}),
    # duplicates
    ("A=1\nA=2", {"A": "2"}),
    ("A=1\nA=", {"A": ""}),
    ("A=1\nB=2\nA=3", {"B": "2", "A": "3"}),
]

# Inputs of which something is refused: where (line:column) and words of the message.
REFUSED: list[tuple[str | bytes, str, str]] = [
    ("PORT", "1:5", "no = on this line"),
    ("export PORT", "1:12", "no = on this line"),
    ("some words here", "1:16", "no = on this line"),
    ("hf_abcdefghijklmnop", "1:20", "no = on this line"),
    ("{", "1:2", "no = on this line"),
    ("[section]", "1:10", "no = on this line"),
    ("; ini comment", "1:14", "no = on this line"),
    ("// comment", "1:11", "no = on this line"),
    ("---", "1:4", "no = on this line"),
    ("PORT: 8000", "1:5", "a colon where = belongs"),
    ("export PORT: 8000", "1:12", "a colon where = belongs"),
    ("PORT:=8000", "1:5", "a colon where = belongs"),
    ("PORT : 8000", "1:6", "a colon where = belongs"),
    ("setenv PORT 8000", "1:1", "a shell command (setenv)"),
    ("source other.env", "1:1", "a shell command (source)"),
    ("  unset PORT", "1:3", "a shell command (unset)"),
    ("if true; then", "1:1", "a shell command (if)"),
    ("set PORT=8000", "1:1", "not a key"),
    ("=8000", "1:1", "no key before the ="),
    ("  = 8000", "1:3", "no key before the ="),
    ("'PORT'=8000", "1:1", "a quote around the key"),
    ('"PORT"=8000', "1:1", "a quote around the key"),
    ("PO-RT=8000", "1:1", "not a key"),
    ("PO.RT=8000", "1:1", "not a key"),
    ("1PORT=8000", "1:1", "not a key"),
    ("MY PORT=8000", "1:1", "not a key"),
    ("PORT+=1", "1:1", "not a key"),
    ("P\u00d6RT=1", "1:1", "not a key"),
    ("PORT\uff1d8000", "1:5", "FULLWIDTH EQUALS SIGN in place of ="),
    # quotes
    ("NAME='abc", "1:6", "the single quote is not closed"),
    ('NAME="abc', "1:6", "the double quote is not closed"),
    ("NAME='", "1:6", "the single quote is not closed"),
    ('NAME="abc\nPORT=1', "1:6", "the double quote is not closed"),
    ("NAME='abc\"", "1:6", "the single quote is not closed"),
    ("NAME='a' b", "1:10", "text after the closing single quote"),
    ("NAME='a'b", "1:9", "text after the closing single quote"),
    ("NAME='a'#b", "1:9", "text after the closing single quote"),
    ("NAME='a''b'", "1:9", "text after the closing single quote"),
    ("NAME='it\\'s'", "1:11", "text after the closing single quote"),
    ('NAME="a\\"b"', "1:10", "text after the closing double quote"),
    ('A="--x" "--y"', "1:9", "text after the closing double quote"),
    ("NAME=\u201cx\u201d", "1:6", "typographic quote (U+201C"),
    ("NAME=\u2018x\u2019", "1:6", "typographic quote (U+2018"),
    ("NAME=x\u201d", "1:7", "typographic quote (U+201D"),
    ("NAME=\u00abx\u00bb", "1:6", "typographic quote (U+00AB"),
    # what cannot be seen
    ("NAME=a\0b", "1:7", "a NUL byte"),
    ("# a\0b", "1:4", "a NUL byte"),
    ("NAME=\u00a0x", "1:6", "invisible character (U+00A0 NO-BREAK SPACE)"),
    ("NAME=x\u200b", "1:7", "invisible character (U+200B ZERO WIDTH SPACE)"),
    ("NAME='x\u200b'", "1:8", "invisible character (U+200B"),
    ("NA\u200bME=x", "1:3", "invisible character (U+200B"),
    ("\u00a0NAME=x", "1:1", "invisible character (U+00A0"),
    ("\u00a0", "1:1", "invisible character (U+00A0"),
    ("NAME=x\u00ad", "1:7", "invisible character (U+00AD SOFT HYPHEN)"),
    ("NAME=x\u202ey", "1:7", "invisible character (U+202E"),
    ("NAME=\x1b[0m", "1:6", "invisible character (U+001B)"),
    ("A=1\x0bB=2", "1:4", "invisible character (U+000B)"),
    ("A=1\x0c", "1:4", "invisible character (U+000C)"),
    ("A=1\x85B=2", "1:4", "invisible character (U+0085)"),
    ("A=1\u2028B=2", "1:4", "invisible character (U+2028"),
    ("A=1\n\ufeffB=2", "2:1", "invisible character (U+FEFF"),
    ("\x0c", "1:1", "invisible character (U+000C)"),
    # bytes
    (b"A=1\n# caf\xe9\nB=2", "2:6", "byte 0xe9 is not UTF-8"),
    (b"A=\xff", "1:3", "byte 0xff is not UTF-8"),
    (b"A=\xc3\xa9\xc3", "1:4", "byte 0xc3 is not UTF-8"),
    (b"A=\xed\xa0\x80", "1:3", "byte 0xed is not UTF-8"),
    # lines that go on
    ("A=x \\\n  y", "1:5", "a backslash at the end"),
    ("A=C:\\", "1:5", "a backslash at the end"),
    # the right line among others
    ("A=1\n\n# x\nB 2\nC=3", "4:4", "no = on this line"),
]

# Inputs that are refused as a whole.
WHOLE: list[tuple[bytes, str]] = [
    ("PORT=8000\n".encode("utf-16"), "UTF-16"),
    ("PORT=8000\n".encode("utf-16-le"), "UTF-16"),
    ("PORT=8000\n".encode("utf-16-be"), "UTF-16"),
    ("# x\r\n".encode("utf-16"), "UTF-16"),
    (b"A=" + b"x" * MAX_BYTES, "larger than 256 KiB"),
    (b"\n" * (10 * 1024 * 1024), "larger than 256 KiB"),
]


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def test_the_table_is_long_enough() -> None:
    assert len(TAKEN) + len(REFUSED) + len(WHOLE) >= 120


@pytest.mark.parametrize(("text", "pairs"), TAKEN, ids=[repr(row[0])[:60] for row in TAKEN])
def test_taken(text: str | bytes, pairs: dict[str, str]) -> None:
    found = parse(_bytes(text))
    assert found.problems == ()
    assert {key: entry.value for key, entry in found.last().items()} == pairs


@pytest.mark.parametrize(("text", "where", "words"), REFUSED, ids=[repr(row[0])[:60] for row in REFUSED])
def test_refused_with_line_and_column(text: str | bytes, where: str, words: str) -> None:
    problem = parse(_bytes(text)).problems[0]
    assert problem.where == f".env:{where}"
    assert words in problem.message
    assert problem.hint


@pytest.mark.parametrize(("data", "words"), WHOLE, ids=[row[1] + str(len(row[0])) for row in WHOLE])
def test_refused_as_a_whole(data: bytes, words: str) -> None:
    found = parse(data)
    assert found.entries == ()
    assert [problem.where for problem in found.problems] == [".env"]
    assert words in found.problems[0].message


# Pieces that make lines which look like settings, and break in every place.
_WORDS = (
    "PORT",
    "A",
    "export ",
    "=",
    " = ",
    "'",
    '"',
    "#",
    " #",
    "\\",
    "$",
    "${A}",
    "`",
    ":",
    "\t",
    " ",
    "x",
    "é",
)
_TRAPS = ("\n", "\r\n", "\r", "\ufeff", "\u00a0", "\u200b", "\u201c", "\0", "\x0b", "\u2028", "1", "-", ".")
_PIECES = st.sampled_from([*_WORDS, *_TRAPS])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_PIECES, max_size=40).map("".join))
def test_every_line_of_a_text_is_accounted_for(text: str) -> None:
    fuzz_dotenv.check(text.encode())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_every_line_of_any_bytes_is_accounted_for(data: bytes) -> None:
    fuzz_dotenv.check(data)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True), st.text("abc XYZ019_./:,=+-#$\\", max_size=20)
    )
)
def test_what_is_written_in_single_quotes_is_read_back(pairs: dict[str, str]) -> None:
    text = "".join(f"{key}='{value}'\n" for key, value in pairs.items())
    found = parse(text.encode())
    assert {key: entry.value for key, entry in found.last().items()} == pairs
    assert (found.problems, found.warnings) == ((), ())


def test_no_problem_shows_the_text_of_a_broken_line() -> None:
    secret = "hf_SECRETsecret0123"
    for line in (
        secret,
        f"HF_TOKEN {secret}",
        f"HF_TOKEN: {secret}",
        f"HF_TOKEN='{secret}",
        f"HF_TOKEN='x' {secret}",
        f"HF_TOKEN=\u201c{secret}\u201d",
        f"HF_TOKEN={secret}\u200b",
        f"HF_TOKEN={secret}\\",
        f"{secret}-x=1",
        f"export {secret}",
    ):
        problems = parse(line.encode()).problems
        assert len(problems) == 1
        assert secret not in problems[0].line()


def test_a_broken_line_does_not_hide_the_others() -> None:
    found = parse(b"A=1\nB\nC=3\nD='\nE=5")
    assert [entry.key for entry in found.entries] == ["A", "C", "E"]
    assert [problem.where for problem in found.problems] == [".env:2:2", ".env:4:3"]


def test_a_duplicate_is_told_and_the_last_one_counts() -> None:
    found = parse(b"PORT=1\nHOST=::1\nPORT=2")
    assert found.last()["PORT"] == Entry("PORT", "2", 3, 6, quoted=False)
    assert [warning.line() for warning in found.warnings] == [
        ".env:3 PORT: set before on line 1; this line counts. Remove one of the two lines"
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("A=$HOME", "nothing is expanded"),
        ("A=$(id)", "nothing is expanded"),
        ("A=`id`", "nothing is expanded"),
        ('A="${HOME}"', "nothing is expanded"),
        ('A="C:\\new"', "a backslash is taken as it stands"),
        ("A=#x", "starts with #"),
    ],
)
def test_a_value_that_others_would_change_is_told(line: str, words: str) -> None:
    assert words in parse(line.encode()).warnings[0].message


@pytest.mark.parametrize("line", ["A=5$", "A=pa$$", "A='$HOME'", "A='C:\\new'", "A=a\\b", "A='#x'", "A=100%"])
def test_an_ordinary_value_is_not_remarked_on(line: str) -> None:
    assert parse(line.encode()).warnings == ()


def test_positions_count_from_one_and_in_characters() -> None:
    found = parse("# é\n  KEY = 'wört'\n".encode())
    assert found.entries == (Entry("KEY", "wört", 2, 10, quoted=True),)


def test_messages_carry_the_name_of_the_file() -> None:
    found = parse(b"X", "env/profiles/cpu.env")
    assert found.problems[0].where == "env/profiles/cpu.env:1:2"
    assert found == DotEnv("env/profiles/cpu.env", problems=found.problems)


def test_each_refusal_is_one_line() -> None:
    for text, _, _ in REFUSED:
        for problem in parse(text if isinstance(text, bytes) else text.encode()).problems:
            assert "\n" not in problem.line()
            assert len(problem.line()) < 220
