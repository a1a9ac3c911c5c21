# Sourced by the scripts beside it: goes to the repository root and makes .venv there, once.
# Again when pyproject.toml or constraints.txt changed since. Paths a user gives are relative to CALLED_FROM.

CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

_find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "hf_posenc needs Python 3.11 or newer with venv; none was found on PATH." >&2
    return 1
}

_ensure_env() {
    local stamp=.venv/.hf_posenc_installed name
    if [[ -f $stamp && ! pyproject.toml -nt $stamp && ! constraints.txt -nt $stamp ]]; then
        return
    fi
    if [[ ! -x .venv/bin/python ]]; then
        name=$(_find_python) || return 1
        echo "Making .venv with $("$name" --version) ..." >&2
        "$name" -m venv .venv || return 1
    fi
    echo "Installing hf_posenc and what it needs into .venv (once; minutes) ..." >&2
    .venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,smollm2]' || return 1
    touch "$stamp"
}

_ensure_env || exit 1
PYTHON=$PWD/.venv/bin/python
# Threads that spin while they wait stall everything else that runs on the same few cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
