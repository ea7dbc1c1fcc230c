"""Stand-in for ssh: ``ssh_stand_in.py HOSTS [-OPTION …] HOST COMMAND`` runs COMMAND in a namespace.

HOSTS is a JSON file: name -> words that enter the host, and a program that Python runs there before
an agent begins. This process relays standard input and
output, like ssh. So if it is killed, the command sees the end of its input, as under sshd.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
from pathlib import Path

AGENT = "collective.launch.hosts.agent"


def main(hosts: str, *arguments: str) -> int:
    """Run the command on the host; return its exit code."""
    words = [word for word in arguments if not word.startswith("-")]
    host, command = words[0], words[1]
    known = json.loads(Path(hosts).read_text())
    if host not in known:
        print(f"ssh: Could not resolve hostname {host}: Name or service not known", file=sys.stderr)
        return 255
    enter, before = known[host]
    if before:
        program = f"{before}\nimport runpy; runpy.run_module({AGENT!r}, run_name='__main__')"
        command = command.replace(f"-m {AGENT}", f"-c {shlex.quote(program)}")
    child = subprocess.Popen(
        [*enter, "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    os.write(1, f"Welcome to {host}\n".encode())  # as a login shell may do
    sources = {0: child.stdin.fileno(), child.stdout.fileno(): 1}
    while child.stdout.fileno() in sources:
        for source in select.select(list(sources), [], [])[0]:
            data = os.read(source, 65536)
            ended = not data
            try:
                while data:
                    data = data[os.write(sources[source], data) :]
            except BrokenPipeError:
                ended = True
            if ended:
                del sources[source]
                if source == 0:
                    child.stdin.close()
    code = child.wait()
    return code if code >= 0 else 255


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
