"""Commands in a real pseudo-terminal, and what their user sees of them in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\].*?(?:\x07|\x1b\\)|([\r\n])|([^\x1b\r\n]+)", re.DOTALL)


def run_in_terminal(command, columns, *, rows=50, code=0, **options):
    """Run a command in a terminal of this many columns, and return its lines as they stand there in the end.

    Lines that have scrolled out of the terminal are included; a line that was wrapped stands on several.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    env["TERM"] = "xterm-256color"
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, **options) as process:
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux: the other end was closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    lines = show(written.decode(), columns, rows)
    assert process.returncode == code, "\n".join(lines)
    return lines


def show(written, columns, rows=50):
    r"""The lines of a terminal after a text with carriage returns and control sequences was written to it.

    >>> show("one\r\ntwo\r\x1b[1A\x1b[2Kthree\r\n", columns=10)
    ['three', 'two']
    """
    screen = [[]]
    row = column = 0

    def write(letters):
        nonlocal row, column
        for letter in letters:
            if column == columns:
                down()
                column = 0
            line = screen[row]
            line.extend(" " * (column + 1 - len(line)))
            line[column] = letter
            column += 1

    def down():
        nonlocal row
        row += 1
        if row == len(screen):
            screen.append([])

    for numbers, command, end, letters in _TOKEN.findall(written):
        number = int(numbers) if numbers.isdigit() else 0
        if letters:
            write(letters)
        elif end == "\r":
            column = 0
        elif end == "\n":
            down()
        elif command == "A":
            row = max(row - max(number, 1), len(screen) - rows, 0)  # what has scrolled away stays as it is
        elif command == "K":
            assert number == 2, "only whole lines are erased"
            screen[row] = []
        else:
            assert command in ("", "m", "h", "l"), (numbers, command)  # colours, and whether the cursor is shown
    lines = ["".join(line).rstrip() for line in screen]
    while lines and not lines[-1]:
        lines.pop()
    return lines
