# Completion of launcher in fish, as written by: launcher --completion fish

function __launcher_values
    switch $argv[1]
@VALUES@
    end
end

function __launcher
    set -l cur (commandline -ct)
    set -l before (commandline -opc)
    set -l prev $before[-1]
    set -l first @FIRST@

    if contains -- $prev --config-dir -cd; or begin; test (count $before) -eq 2; and contains -- $prev $first; end
        __fish_complete_directories $cur
    else if contains -- $prev --cfg -c
        echo job
    else if test "$prev" = --completion
        string split ' ' 'bash zsh fish'
    else if string match -q -- '-*' $cur
        string split -- ' ' '@FLAGS@'
    else if string match -q -- '*=*' $cur
        set -l parts (string split -m 1 = -- $cur)
        set -l head (string match -r -- '^.*,|^' $parts[2])
        set -l listed (__launcher_values (string replace -r '^\++' '' -- $parts[1]))
        string join \n -- $parts[1]=$head$listed
        set -l found
        switch $parts[1]
            case recipe
                set found $parts[2]*/ $parts[2]*.yaml
            case run_dir sweep_dir runs
                set found $parts[2]*/
        end
        string join \n -- $parts[1]=$found
    else
        set -l start (string escape --style=regex -- $cur)
        string match -r -- "^$start"'([^.]+\.?|\.)$' @KEYS@
        test (count $before) -eq 1; and string join \n -- $first
    end
end

complete -c launcher -f -a '(__launcher)'
