import torch

from spot.training.optim import Muon, build_optimizer, orthogonal
from spot.training.recipes import find_recipe
from tests.conftest import make_nano


def test_a_direction_keeps_its_singular_vectors_and_loses_its_singular_values():
    matrices = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(0))
    for matrix, found in zip(matrices, orthogonal(matrices), strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        values = left.T @ found @ right.T  # diagonal, if the vectors are the same
        assert (values - values.diag().diag()).abs().max() < 1e-3
        assert ((values.diag() > 0.6) & (values.diag() < 1.3)).all()
    assert torch.equal(orthogonal(matrices.mT), orthogonal(matrices).mT)


def test_a_step_is_as_long_as_adamws_and_weights_decay():
    matrix = torch.nn.Parameter(torch.ones(16, 64))
    optimizer = Muon([{"params": [matrix], "orthogonal": True}], lr=0.1, weight_decay=0.5)
    matrix.grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    moved = matrix.detach() - (1 - 0.1 * 0.5)
    # 16 singular values of about 1, in 16 × 64 entries, times 0.2 · √64: a root mean square of 0.2.
    assert 0.8 < moved.square().mean().sqrt() / (0.1 * 0.2) < 1.2


def test_what_is_no_matrix_of_a_block_learns_by_adamw():
    model = make_nano()
    optimizer = build_optimizer(model, find_recipe("scenes"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {names[id(each)]: group["orthogonal"] for group in optimizer.param_groups for each in group["params"]}
    assert set(groups) == set(names.values())
    for name, inside in groups.items():
        assert inside == (name.startswith("vit.blocks") and name.endswith("weight") and "norm" not in name), name
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model.vit.head.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - model.vit.head.bias, torch.full((10,), 3e-3))  # AdamW's first step is the rate


def test_a_saved_optimizer_goes_on_as_it_would_have():
    def steps(optimizer, matrix, seeds):
        for seed in seeds:
            matrix.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    def made(values):
        matrix = torch.nn.Parameter(values.clone())
        return matrix, Muon([{"params": [matrix], "orthogonal": True}], lr=0.1)

    whole, optimizer = made(torch.eye(8))
    steps(optimizer, whole, (0, 1, 2))
    first, optimizer = made(torch.eye(8))
    steps(optimizer, first, (0, 1))
    second, resumed = made(first.detach())
    resumed.load_state_dict(optimizer.state_dict())
    steps(resumed, second, (2,))
    assert torch.equal(whole, second)
