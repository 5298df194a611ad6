"""The Python side of the pretended CUDA device: torch.cuda, kernels that only CUDA has, NCCL's rules, host waits."""


def install() -> None:
    """Gives torch, which has just been imported, the device of the library that is loaded; initialises nothing."""
    from pretended_cuda import kernels, nccl, torch_cuda

    torch_cuda.install()
    kernels.install()
    nccl.install()
