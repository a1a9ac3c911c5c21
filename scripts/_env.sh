# Sourced by the scripts beside it: goes to the repository root and makes an environment there, once, and again when
# pyproject.toml or constraints.txt changed since. HF_POSENC_VERSIONS says which versions it has:
#   pinned  .venv, the versions of constraints.txt (the default)
#   floors  .venv-floors, the lowest versions that pyproject.toml allows
#   newest  .venv-newest, the newest versions that pyproject.toml allows; brought up to date each time
# HF_POSENC_PYTHON is the Python to make it with, by name or absolute path; without it, the first that is new enough.
# Paths a user gives are relative to CALLED_FROM.

CALLED_FROM=$PWD
unset CDPATH  # with which cd may go to another folder
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

HF_POSENC_VERSIONS=${HF_POSENC_VERSIONS:-pinned}
case $HF_POSENC_VERSIONS in
    pinned) VENV=.venv ;;
    floors | newest) VENV=.venv-$HF_POSENC_VERSIONS ;;
    *)
        echo "HF_POSENC_VERSIONS is pinned, floors or newest, not '$HF_POSENC_VERSIONS'." >&2
        exit 1
        ;;
esac

_find_python() {
    local name names=(python3.11 python3.12 python3.13 python3 python)
    [[ -z ${HF_POSENC_PYTHON:-} ]] || names=("$HF_POSENC_PYTHON")
    for name in "${names[@]}"; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "hf_posenc needs Python 3.11 or newer with venv; none was found as ${names[*]}." >&2
    return 1
}

_ensure_env() {
    local stamp=$VENV/.hf_posenc_installed name options=(-c constraints.txt)
    if [[ ! -x $VENV/bin/python ]]; then
        name=$(_find_python) || return 1
        echo "Making $VENV with $("$name" --version) ..." >&2
        "$name" -m venv "$VENV" || return 1
    elif [[ -n ${HF_POSENC_PYTHON:-} && $("$HF_POSENC_PYTHON" --version) != $("$VENV/bin/python" --version) ]]; then
        echo "$VENV was made with $("$VENV/bin/python" --version), not with $HF_POSENC_PYTHON; remove it first." >&2
        return 1
    fi
    case $HF_POSENC_VERSIONS in
        floors)
            "$VENV/bin/python" scripts/floors.py >"$VENV/floors.txt" || return 1
            options=(-c "$VENV/floors.txt")
            ;;
        newest) options=(--upgrade --upgrade-strategy eager) ;;
    esac
    if [[ $HF_POSENC_VERSIONS != newest && -f $stamp && ! pyproject.toml -nt $stamp && ! constraints.txt -nt $stamp ]]; then
        return
    fi
    echo "Installing hf_posenc and what it needs into $VENV (minutes the first time) ..." >&2
    "$VENV/bin/python" -m pip install --quiet "${options[@]}" -e '.[dev,docs,smollm2]' || return 1
    touch "$stamp"
}

_ensure_env || exit 1
PYTHON=$PWD/$VENV/bin/python
# Threads that spin while they wait stall everything else that runs on the same few cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
