"""Keywords of other libraries and of configs raise errors that say what to write."""

import inspect

import pytest
from torch import nn

import jagged_modules as jm

LAYERS = [
    value
    for name in jm.__all__
    if inspect.isclass(value := getattr(jm, name)) and issubclass(value, nn.Module)
]


@pytest.mark.parametrize("keyword", ["embed_dim", "d_model"])
@pytest.mark.parametrize(
    "layer", [cls for cls in LAYERS if "embedding_dim" in inspect.signature(cls).parameters]
)
def test_the_width_of_other_libraries(layer, keyword):
    with pytest.raises(TypeError, match=f"^{layer.__name__} .*{keyword}: write embedding_dim$"):
        layer(**{keyword: 64}, num_heads=4)


@pytest.mark.parametrize(
    "layer", [cls for cls in LAYERS if "mask" in inspect.signature(cls).parameters]
)
def test_a_causal_mask_is_an_attention_mask(layer):
    with pytest.raises(TypeError, match=r"write mask=AttentionMask\(causal=True\)$"):
        layer(64, num_heads=4, causal=True)


def test_keywords_of_encoder_layers():
    with pytest.raises(TypeError, match="nhead: write num_heads$"):
        jm.JaggedEncoderLayer(64, nhead=4, ffn_dim=64)
    with pytest.raises(TypeError, match="dim_feedforward: write ffn_dim$"):
        jm.JaggedEncoderLayer(64, 4, dim_feedforward=64)


@pytest.mark.parametrize(
    "layer", [cls for cls in LAYERS if "config" in inspect.signature(cls).parameters]
)
def test_keywords_of_a_config(layer):
    arguments = inspect.signature(layer).parameters
    name = arguments["config"].annotation.partition(" ")[0]
    for field in inspect.signature(getattr(jm, name)).parameters.keys() - arguments.keys():
        with pytest.raises(TypeError, match=rf"{field}: write config={name}\({field}=\.\.\.\)$"):
            layer(64, num_heads=4, **{field: 1})


def test_other_keywords_have_pythons_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        jm.JaggedTargetAttention(64, num_heads=4, causal=True)
