#!/bin/sh
# Makes .venv and installs the project into it with the versions of constraints.txt.
# Every failure that a user can meet ends in one line that says what to do.

need="3.11"

fail() {
    echo "error: $1" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "$PYTHON" ]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python $need or newer; name another one or leave PYTHON out"
        python=$PYTHON
        return
    fi
    found=""
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        command -v "$name" >/dev/null 2>&1 || continue
        if new_enough "$name"; then
            python=$name
            return
        fi
        version=$("$name" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
        found="$found $name=${version:-broken}"
    done
    fail "Python $need or newer is needed, found${found:- none}; install one, or name one with: make PYTHON=/path/to/python$need"
}

disk_full() {
    fail "the disk is full while $1; about 6 GB are needed in $(pwd) and for temporary files in ${TMPDIR:-/tmp}: free some space, then run make again"
}

# venv hides why it could not unpack pip, so ask the disk itself.
can_write() {
    head -c 20000000 /dev/zero 2>/dev/null >.venv/.probe
    written=$?
    rm -f .venv/.probe
    return $written
}

# Turns the stderr of a failed step ($2) into one line; $1 says what the step was.
explain() {
    case $2 in
    *"No space left"* | *"Errno 28"* | *"ENOSPC"* | *"Disk quota"*)
        disk_full "$1" ;;
    *"No module named venv"* | *ensurepip*)
        fail "$python has no venv module; install it (Debian, Ubuntu: apt install python3-venv) or name another Python: make PYTHON=..." ;;
    *"NewConnectionError"* | *"Failed to establish"* | *"name resolution"* | *"Max retries"* | *"timed out"* | \
    *"onnection refused"* | *"ProxyError"* | *"SSLError"* | *"Could not fetch URL"* | *"onnection broken"* | *"from versions: none"*)
        fail "no package index could be reached while $1; check the network (and pip's index and proxy settings), then run make again" ;;
    *"ermission denied"* | *"Errno 13"* | *"Read-only file system"*)
        fail "$(pwd) cannot be written while $1; clone into a folder that is yours" ;;
    esac
    # pip's own last error says most.
    last=$(printf '%s\n' "$2" | grep -i -e '^ *error' | tail -n 1)
    [ -n "$last" ] || last=$(printf '%s\n' "$2" | grep -v '^ *$' | tail -n 1)
    fail "$1 failed: ${last:-no message}; remove .venv and run make again"
}

find_python

if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1 || ! new_enough .venv/bin/python; then
    echo "Making .venv with $("$python" --version 2>&1) ..."
    # The messages are kept in memory, not in a file: the disk may be what failed. venv reports on both streams.
    messages=$("$python" -m venv --clear .venv 2>&1) || {
        [ ! -d .venv ] || can_write || disk_full "making .venv"
        explain "making .venv" "$messages"
    }
fi

echo "Installing into .venv (a few minutes the first time) ..."
exec 3>/dev/null
[ -t 1 ] && exec 3>&1
messages=$({ .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' 1>&3; } 2>&1) ||
    explain "installing packages" "$messages"
messages=$({ : >.venv/.installed; } 2>&1) || explain "finishing the installation" "$messages"
echo "Installed."
