"""Linear layers with weights of 8 bits, one scale a row, as PyTorch multiplies them on a CPU."""

import torch


class Int8Linear(torch.nn.Module):
    """
    A linear layer, its weights rounded to 8 bits; inputs are multiplied in bfloat16.

    Args:
        linear (`torch.nn.Linear`): what it stands for.
    """

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        weight = linear.weight.data.float()
        scales = weight.abs().amax(dim=1).clamp(min=1e-9) / 127
        self.out_features = linear.out_features
        self.register_buffer("weight", (weight / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales.to(torch.bfloat16))
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape `(..., in_features)` to `(..., out_features)`."""
        flat = inputs.reshape(-1, inputs.shape[-1]).to(torch.bfloat16)
        outputs = torch._weight_int8pack_mm(flat, self.weight, self.scales)
        outputs = outputs.view(*inputs.shape[:-1], self.out_features).to(inputs.dtype)
        return outputs if self.bias is None else outputs + self.bias


def to_int8(module: torch.nn.Module) -> None:
    """Replaces all linear layers in a module, in place."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            to_int8(child)


def parameters_of(model) -> int:
    """Of a model, those in 8 bits among them."""
    packed = sum(module.weight.numel() for module in model.modules() if isinstance(module, Int8Linear))
    return model.num_parameters() + packed
