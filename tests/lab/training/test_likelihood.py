import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreograph.lab.training import losses as likelihood
from choreograph.lab.training.losses import log_likelihood, log_probs


def drawn(rows, vocabulary, each, seed, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(seed)
    logits = (8 * torch.randn(rows, vocabulary, generator=numbers)).to(dtype).requires_grad_()
    return logits, torch.randint(vocabulary, (rows, each), generator=numbers), numbers


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 5), st.integers(1, 100), st.integers(0, 1 << 20))
def test_values_and_gradients_are_those_of_the_whole_table(rows, vocabulary, each, at_once, seed):
    """However many rows are widened at once, and where a token is asked for twice."""
    logits, ids, numbers = drawn(rows, vocabulary, each, seed)
    weights = torch.randn(rows, each, generator=numbers)
    expected = logits.log_softmax(-1).gather(1, ids)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "MAX_CHUNK_LOGITS", at_once)
        result = log_probs(logits, ids)
        (mine,) = torch.autograd.grad((result * weights).sum(), logits)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, gradient, atol=1e-5, rtol=1e-5)


def test_narrow_logits_are_widened_before_anything_is_summed():
    logits, ids, _ = drawn(7, 5000, 3, 0, torch.bfloat16)
    wide = logits.detach().float().requires_grad_()
    expected, result = wide.log_softmax(-1).gather(1, ids), log_probs(logits, ids)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    expected.sum().backward()
    result.sum().backward()
    torch.testing.assert_close(logits.grad, wide.grad.to(torch.bfloat16))


def test_the_likelihood_is_the_cross_entropy():
    logits, ids, _ = drawn(5, 300, 1, 3)
    expected = -torch.nn.functional.cross_entropy(logits, ids[:, 0], reduction="none")
    torch.testing.assert_close(log_likelihood(logits, ids[:, 0].tolist()), expected)
