"""spot completion: what makes a shell complete verbs, options, models and priors."""

from collections.abc import Iterable
from typing import Annotated, Literal

from tyro.conf import Positional, arg

SCRIPT = """# {how}
{prepare}_spot() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} option= words= index
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs} --help --version" -- "$word")); return
    fi
    for ((index = COMP_CWORD - 1; index > 1; index--)); do  # values follow their option
        case ${{COMP_WORDS[index]}} in --*) option=${{COMP_WORDS[index]}}; break ;; esac
    done
    case "$word" in --*) option=-- ;; esac
    case "$verb $option" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _spot spot
"""


def completion(shell: Annotated[Positional[Literal["bash", "zsh"]], arg(metavar="bash|zsh")], /) -> None:
    """Print the completion of a shell: verbs, options, names of models, priors, recipes and studies.

    Put it into a file that your shell reads when it starts; it needs no Python when it completes.

    Args:
        shell: bash or zsh.

    example: spot completion bash > ~/.local/share/bash-completion/completions/spot
    """
    import tyro

    from spot.commands import VERBS, verb_function
    from spot.models.checkpoints import built_in
    from spot.models.reach import ALIASES
    from spot.placement.priors import LEARNED, PRIORS
    from spot.placement.saliency import SALIENCIES
    from spot.studies.study import STUDIES
    from spot.training.recipes import RECIPES

    models = [*ALIASES, *built_in()]
    values: dict[str, Iterable[str]] = {
        "MODEL": models,
        "--model": models,
        "--prior": (*PRIORS, LEARNED),
        "--recipe": RECIPES,
    }
    values |= {"--saliency": SALIENCIES, "--method": SALIENCIES, "NAME": [*STUDIES, "all", "findings"]}
    cases = []
    for verb in VERBS:
        flags: list[str] = []
        for action in tyro.extras.get_parser(verb_function(verb))._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            flags += names
            key = next(iter(names), str(action.metavar).removesuffix(" ..."))
            choices = sorted({*(action.choices or ())} - {"None"}) or values.get(key, ())
            cases += [(f"{verb} {names[0] if names else ''}", choices)] * bool(choices)
        cases.append((f"{verb} --", flags))
    prepare = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    lines = "\n".join(f'        "{case}") words="{" ".join(map(str, words))}" ;;' for case, words in cases)
    how = f"completion of spot for {shell}, printed by spot completion {shell}"
    print(SCRIPT.format(how=how, prepare=prepare, verbs=" ".join(VERBS), cases=lines))
