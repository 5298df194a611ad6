# What commands answer in the sandbox of a launch script; every bash there reads it first (BASH_ENV).
#
# A command that is a function of its words and its input runs. The words of all others are noted, and where they start
# verl, that is the launch. They succeed, unless _ASK_FAILING names them, and print a mark, @@LINE@NAME@@, by which
# everything is known that depends on them. The lines before this one set the other variables _ASK_*.

PS4=$'\036${BASH_SOURCE-}\037${LINENO}\037${PWD}\037'
_ASK_ENTRY_POINT='(^|[./])((async_)?main_(ppo|dapo)[a-z_]*|fully_async_main)(\.py)?$'
_ASK_MARK='@@[0-9]+@[^@]*@@'

# _ask_note KIND WORD...: fields that end with NUL: kind, line, number of words, words.
_ask_note() { printf '%s\0' "$1" "$line" "$(($# - 1))" "${@:2}" >&"$_ASK_NOTES_FD"; }

command_not_found_handle() {
  trap - DEBUG
  set +xeuT
  local line place=0 name
  while [[ ${BASH_SOURCE[place + 1]-} == /answers.bash ]]; do ((++place)); done
  line=${BASH_LINENO[place]}
  set -- "${1##*/}" "${@:2}"
  for ((place = 1; place <= $#; place++)); do
    if [[ ${!place} =~ $_ASK_ENTRY_POINT ]]; then
      _ask_note launch "${@:place+1}"
      return 0
    elif [[ ${!place} == *[[:space:]]* && ${!place} =~ main_(ppo|dapo)|fully_async_main ]]; then
      bash -c "${!place}" # for a shell elsewhere: srun, ssh, docker exec
      return
    fi
  done
  if [[ $1 == bash || $1 == sh ]]; then
    bash "${@:2}"
    return
  elif [[ -x /tools/$1 ]] && { [[ $1 != env ]] || (($# == 1)); }; then
    _ask_tool "$@"
    return
  fi
  [[ $1 != python* || $* != *torch_npu* ]] || return 1 # there are no NPUs here
  name=${1//[^A-Za-z0-9_.+-]/_}
  ! _ask_fails "$name" || return 1
  echo "@@$line@$name@@"
}

# Notes a command whose status is not known; it fails once, as loops wait for commands.
_ask_fails() {
  _ask_note call "$1"
  [[ $_ASK_FAILING == *" $line@$1 "* && ! -e /tmp/.failed.$line@$1 ]] && : >"/tmp/.failed.$line@$1"
}

# What a command has marked is marked behind every tool, too, whose status is not known then.
_ask_tool() {
  local input=/dev/null
  case $1 in
    date) set -- date --date="@$_ASK_NOW" "${@:2}" ;;
    cat | head | tail | cut | sed | grep | awk | tr | sort | uniq | wc | tee | xargs)
      input=$(/tools/mktemp) && /tools/cat >"$input"
      ;;
  esac
  local word mark marked=("$input")
  for word in "${@:2}"; do [[ -f $word ]] && marked+=("$word"); done # a file that is not read has a mark in it
  if [[ $* =~ $_ASK_MARK ]]; then
    mark=${BASH_REMATCH[0]}
  elif ! mark=$(/tools/grep -Eoh -m 1 "$_ASK_MARK" "${marked[@]}"); then
    PATH=/tools "/tools/$1" "${@:2}" <"$input"
    return
  fi
  echo "$mark"
  ! _ask_fails "$1"
}

# These look for programs themselves, and would not ask the handler above.
exec() {
  if (($#)); then
    "$@"
    exit
  fi
}
command() {
  case $1 in
    -v | -V) (command_not_found_handle "command$1" "$2") ;;
    *) "$@" ;;
  esac
}
for _ask_program in $_ASK_PROGRAMS; do # by their paths
  eval "function $_ask_program() ( command_not_found_handle $_ask_program \"\$@\" )"
done
sh() { bash "$@"; }
ulimit() { :; }
# A folder of the machine that verl ran on.
cd() { builtin cd "$@" 2>/dev/null || { /tools/mkdir -p -- "${@: -1}" && builtin cd "$@"; }; }

# A trace has the words of tests, but not of `case`.
_ask_tested() { :; }
_ask_is_case() { [[ $BASH_COMMAND == "case "* ]]; }
# A test in a line of _ASK_PASSED is not made and holds: extdebug skips a command where this trap fails.
_ask_is_passed() { [[ $_ASK_PASSED == *" $1 "* && $BASH_COMMAND =~ ^(\[|\[\[|test)" " ]] && shopt -s extdebug; }
trap '_ask_is_case && eval "_ask_tested ${BASH_COMMAND:5:-4}"; ! _ask_is_passed "$LINENO"' DEBUG

set "-xT$_ASK_STRICT"
