#!/usr/bin/env bash
# Fine-tune a model on several GPUs of one machine, with FSDP2: weights, gradients and optimizer states are shared out.
#
#   examples/several_gpus.sh MODEL TEXTS OUTPUT_DIR [NUM_PROCESSES] [more flags of hf-posenc finetune ...]
#
# MODEL is a name on the Hub or a folder, TEXTS a text file or a folder of text files, NUM_PROCESSES the number of GPUs
# (2 if left out). For example:
#
#   examples/several_gpus.sh HuggingFaceTB/SmolLM2-1.7B-Instruct my_texts outputs/longer 8 --token-budget 10M
#
# The command starts itself again in that many processes, through `accelerate launch`. ACCELERATE_CONFIG says how they
# share the work, in place of fsdp2: multi_gpu (DDP: each GPU holds the whole model), zero2 or zero3 (DeepSpeed), or the
# path of a configuration file that `accelerate config` wrote.
#
# Without GPUs, try it with two processes on the CPU, where FSDP cannot be used:
#
#   ACCELERATE_CONFIG=multi_gpu examples/several_gpus.sh MODEL TEXTS OUTPUT_DIR 2 --device cpu
set -euo pipefail
if [[ $# -lt 3 ]]; then
    echo "usage: $0 MODEL TEXTS OUTPUT_DIR [NUM_PROCESSES] [more flags of hf-posenc finetune ...]" >&2
    exit 2
fi
model=$1 texts=$2 output_dir=$3
shift 3
num_processes=2
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    num_processes=$1
    shift
fi

# The number of blocks in a step is processes x --per-device-train-batch-size x --gradient-accumulation-steps. A run that
# was interrupted can go on with another number of processes (--resume-from-checkpoint) if the product stays the same.
hf-posenc finetune "$model" --documents "$texts" --method yarn --factor 4 --output-dir "$output_dir" \
    --accelerate-config "${ACCELERATE_CONFIG:-fsdp2}" --num-processes "$num_processes" --gradient-checkpointing "$@"
