"""Plugin of vLLM that repairs the norm of context keys of DFlash drafters on a CPU.

vLLM 0.32.0 normalises the keys of all drafter layers in one call, with one row of weights for each layer (vllm#46761). Its
CPU kernel applies the first row to every layer, without an error (vllm#56431 is the same defect on XPU).
"""


def register():
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def normalize(self, keys):  # [layers, tokens, heads, head_dim]
        wide = keys.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return wide.to(keys.dtype) * self._k_norm_weights[:, None, None, :]

    DFlashQwen3Model._normalize_context_k = normalize
