"""Products of few rows by AMX, emulated, against a plain product."""

import ctypes
from pathlib import Path

import pytest
import torch

import choreograph.attention
import choreograph.models
from choreograph.attention.cpp_backend import compile_library

HEADER = Path(choreograph.models.__file__).parent / "operators" / "amx_products.h"
FOLDER = Path(choreograph.attention.__file__).parent
FLAGS = ("-include", str(Path(__file__).parents[1] / "helpers" / "amx_emulation.h"), f"-I{FOLDER}")
SOURCE = """#include "%s"
extern "C" void product(const bf16* x, int64_t x_row, int rows, int64_t inputs, const bf16* weight, int64_t row,
                        int64_t features, float* out, int64_t out_row) {
  std::vector<bf16> packed(amx_packed_size(rows, inputs));
  enter_amx();
  amx_pack(x, x_row, rows, inputs, packed.data());
  amx_product(packed.data(), rows, inputs, weight, row, features, out, out_row);
  leave_amx();
}
"""


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """Function of x (rows, inputs), weight (features, inputs) and out (rows, features), whose rows may be apart."""
    folder = tmp_path_factory.mktemp("amx")
    source = folder / "product.cpp"
    source.write_text(SOURCE % HEADER)
    library = ctypes.CDLL(str(compile_library("product", [source], FLAGS, folder)))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.product.argtypes = (pointer, long, ctypes.c_int, long, pointer, long, long, pointer, long)

    def run(x, weight, out):
        library.product(
            *(x.data_ptr(), x.stride(0), *x.shape),
            *(weight.data_ptr(), weight.stride(0), len(weight)),
            *(out.data_ptr(), out.stride(0)),
        )

    return run


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 32, 33, 48, 49, 64])
@pytest.mark.parametrize(("inputs", "features"), [(32, 16), (96, 40), (576, 72)])
def test_the_product_equals_a_plain_one(product, rows, inputs, features):
    noise = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs + 32, generator=noise).bfloat16()[:, :inputs] for n in (rows, features))
    wide = torch.full((rows + 1, features + 3), 7.0)
    product(x, weight, wide[:rows, :features])
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(wide[:rows, :features].double(), expected, atol=1e-4, rtol=1e-5)
    assert (wide[rows:] == 7).all() and (wide[:, features:] == 7).all()  # nothing else is written


def test_an_output_depends_neither_on_rows_nor_on_the_division_of_features(product):
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 576, generator=noise).bfloat16() for n in (64, 96))
    full, parts = torch.empty(64, 96), torch.empty(64, 96)
    product(x, weight, full)
    for rows in (2, 17, 33):
        product(x[:rows], weight[:48], parts[:rows, :48])
        product(x[:rows], weight[48:], parts[:rows, 48:])
        assert torch.equal(parts[:rows], full[:rows])
