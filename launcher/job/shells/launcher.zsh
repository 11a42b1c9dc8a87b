#compdef launcher
# Completion of launcher in zsh, as written by: launcher --completion zsh

_launcher_values() {
    case $1 in
@VALUES@
    esac
}

_launcher() {
    local cur=$PREFIX prev=${words[CURRENT-1]} word key
    local -a first=(@FIRST@) listed=()

    if [[ $prev == (--config-dir|-cd) ]] || (( CURRENT == 3 && first[(Ie)$prev] )); then
        _files -/
    elif [[ $prev == (--cfg|-c) ]]; then
        compadd -- job
    elif [[ $prev == --completion ]]; then
        compadd -- bash zsh fish
    elif [[ $cur == -* ]]; then
        compadd -- @FLAGS@
    elif [[ $cur == *=* ]]; then
        key=${cur%%=*}
        compset -P '*='
        case $key in
            recipe) _files -g '*.yaml' ;;
            run_dir | sweep_dir | runs) _files -/ ;;
        esac
        compset -P '*,'
        compadd -- $(_launcher_values ${key#+})
    else
        for word in @KEYS@; do
            [[ $word == ${(b)cur}?* && ${${word#${(b)cur}}%.} != *.* ]] && listed+=($word)
        done
        compadd -S '' -a listed
        (( CURRENT == 2 )) && compadd -a first
    fi
}

if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _launcher "$@"
else
    compdef _launcher launcher
fi
