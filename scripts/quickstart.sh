#!/usr/bin/env bash
# From a clean clone to a chat model answering with a drafter speculating for it.
#
#   ./scripts/quickstart.sh [--drafter DIR] [--prompt TEXT]
#
# Without --drafter a drafter is looked for beside the checkout; without any, the plain run is shown.
set -euo pipefail
here=$(pwd)
cd "$(dirname "$0")/.."
. scripts/environment.sh

prompt="A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"
drafter=""
while [ $# -gt 0 ]; do
    case $1 in
    --drafter) drafter=$(cd "$here" && realpath "${2:?--drafter needs a folder}") && shift 2 ;;
    --prompt) prompt=${2:?--prompt needs a text} && shift 2 ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0" && exit ;;
    *) say "unknown option $1 (see --help)" && exit 2 ;;
    esac
done
if [ -z "$drafter" ]; then
    for candidate in drafters/smollm2-135m-eagle3.1 ../drafters/smollm2-135m-eagle3.1 ../shared/drafters/smollm2-135m-eagle3.1; do
        if [ -f "$candidate/config.json" ]; then drafter=$candidate && break; fi
    done
fi

ensure_environment ""
if [ -n "$drafter" ]; then
    say "SmolLM2-135M-Instruct answers; the EAGLE-3 drafter in $drafter guesses ahead; plain decoding is run beside it"
    eagle-jax generate --target smollm2-135m --drafter "$drafter" --prompt "$prompt" --max-new-tokens 128 --compare
    say "Next: other prompts (--prompts FILE.jsonl), the drafter itself (eagle-jax inspect $drafter), the README"
else
    say "SmolLM2-135M-Instruct answers, without a drafter"
    eagle-jax generate --target smollm2-135m --drafter none --prompt "$prompt" --max-new-tokens 128
    say "No drafter was found. Give one with --drafter DIR: any EAGLE-3 or EAGLE-3.1 drafter for SmolLM2-135M-Instruct, in"
    say "the layout of SafeAILab, SpecForge/SGLang, vLLM, speculators, TorchSpec, Model-Optimizer or NeMo Automodel"
fi
