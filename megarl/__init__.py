"""megarl: reinforcement-learning post-training of large language models on Slurm clusters.

Megatron-core trains, SGLang generates, they share the same GPUs, and `sbatch` is the whole orchestration.
"""
