"""Stand-in for SGLang's compiled kernels, for development on a CPU only. Never install it where a GPU serves.

When SGLang 0.5.23 runs its CPU engine (SGLANG_USE_CPU_ENGINE=1), the functions named below must be importable from
`sgl_kernel`. The published package is built for CUDA and lacks them; they are compiled only in a build for Intel's AMX.

With the torch_native attention backend, serving (prefill, decoding, radix cache, retraction, weight updates) calls none
of them: they belong to speculative decoding, which therefore does not run on this stub. So each can be imported and
refuses to be called. Any other name is missing, as it is in a package without it: SGLang has fallbacks for that.

Nothing is registered under `torch.ops.sgl_kernel`, from which SGLang concludes that there are no AMX kernels and takes
the plain PyTorch path in every layer.
"""

from collections.abc import Callable
from typing import NoReturn

SPECULATIVE_OPS = frozenset(
    {
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    }
)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in SPECULATIVE_OPS:
        raise AttributeError(f"sgl_kernel has no {name!r}: this is the stub for development on a CPU")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} belongs to speculative decoding, which the stub for development on a CPU leaves out; "
            "serve without speculation, or on a GPU with the real sglang-kernel"
        )

    refuse.__name__ = name
    return refuse
