"""Parent of an embedded server: ``_watcher.py USERS COMMAND...`` runs the command and stops it when nobody uses it.

Users hold a shared lock on the file ``USERS``. Run as a program with the standard library alone, so that it is small.
"""

import _thread
import fcntl
import os
import signal
import sys


def main(users: str, *command: str) -> None:
    """Run until the server is gone."""
    server = os.posix_spawn(command[0], command, os.environ)

    def stop_when_unused() -> None:
        fcntl.flock(os.open(users, os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_EX)
        os.kill(server, signal.SIGTERM)

    _thread.start_new_thread(stop_when_unused, ())
    os.waitpid(server, 0)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
