# Completion of launcher in bash, as written by: launcher --completion bash

_launcher_values() {
    case $1 in
@VALUES@
    esac
}

_launcher() {
    local line=${COMP_LINE:0:COMP_POINT} cur prev word rest key value listed cut=
    local -a words found=()
    cur=${line##*[[:space:]]}
    read -ra words <<< "${line%"$cur"}"
    prev=${words[${#words[@]} - 1]}
    COMPREPLY=()

    if [[ $prev == --config-dir || $prev == -cd || (${#words[@]} -eq 2 && " @FIRST@ " == *" $prev "*) ]]; then
        _launcher_files "" "$cur" /
    elif [[ $prev == --cfg || $prev == -c ]]; then
        _launcher_add "$cur" job
    elif [[ $prev == --completion ]]; then
        _launcher_add "$cur" bash zsh fish
    elif [[ $cur == -* ]]; then
        _launcher_add "$cur" @FLAGS@
    elif [[ $cur == *=* ]]; then
        key=${cur%%=*}
        value=${cur#*=}
        rest=
        [[ $value == *,* ]] && rest=${value%,*},
        for word in $(_launcher_values "${key#+}"); do
            found+=("$key=$rest$word")
        done
        _launcher_add "$cur" "${found[@]}"
        case $key in
            recipe) _launcher_files "$key=" "$value" .yaml ;;
            run_dir | sweep_dir | runs) _launcher_files "$key=" "$value" / ;;
        esac
    else
        for word in @KEYS@; do
            rest=${word#"$cur"}
            [[ $word == "$cur"?* && ${rest%.} != *.* ]] && COMPREPLY+=("$word")
        done
        [[ ${#words[@]} -eq 1 ]] && _launcher_add "$cur" @FIRST@
    fi

    # readline takes what follows the last of its own breaks for the word
    for word in = :; do
        rest=${cur##*"$word"}
        [[ $COMP_WORDBREAKS == *"$word"* && $cur == *"$word"* ]] && rest=${cur%"$rest"} && [[ ${#rest} -gt ${#cut} ]] && cut=$rest
    done
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
}

# words that begin as $1; each is complete, so a space follows
_launcher_add() {
    local word
    for word in "${@:2}"; do
        [[ $word == "$1"* ]] && COMPREPLY+=("$word ")
    done
}

# after $1 the folders, and the files in $3, that begin as $2
_launcher_files() {
    local path
    while IFS= read -r path; do
        if [[ -d $path ]]; then
            COMPREPLY+=("$1$(printf %q "$path")/")
        elif [[ $3 != / && $path == *"$3" ]]; then
            COMPREPLY+=("$1$(printf %q "$path") ")
        fi
    done < <(compgen -f -- "$2")
}

complete -o nospace -F _launcher launcher
