"""Products by AMX, emulated, against a plain product."""

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
  for (int first = 0; first < rows; first += 16) amx_pack(x, x_row, rows, inputs, first, packed.data());
  amx_product(packed.data(), rows, inputs, weight, row, features, nullptr, out, out_row);
  leave_amx();
}
extern "C" void product_of_packed(const bf16* x, int64_t x_row, int rows, int64_t inputs, const bf16* weight,
                                  int64_t row, int64_t features, float* out, int64_t out_row) {
  std::vector<bf16> packed(amx_packed_size(rows, inputs)), weights(amx_packed_size(features, inputs));
  float sums[32 * 32];
  enter_amx();
  for (int first = 0; first < rows; first += 16) amx_pack_rows(x, x_row, rows, inputs, first, packed.data());
  pack<bf16>(weight, row, (features + 15) / 16, features, inputs, inputs, nullptr, weights.data());
  for (int m = 0; m < rows; m += 32)
    for (int f = 0; f < features; f += 32) {
      int count = std::min(32, rows - m), width = std::min<int>(32, features - f);
      const bf16* left = &weights[f * inputs];
      amx_product_of_packed(&packed[m * inputs], count, left, width > 16 ? left + 16 * inputs : nullptr, inputs, sums);
      for (int r = 0; r < count; r++) std::copy_n(sums + r * 32, width, out + (m + r) * out_row + f);
    }
  leave_amx();
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amx")
    source = folder / "product.cpp"
    source.write_text(SOURCE % HEADER)
    library = ctypes.CDLL(str(compile_library("product", [source], FLAGS, folder)))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    for function in (library.product, library.product_of_packed):
        function.argtypes = (pointer, long, ctypes.c_int, long, pointer, long, long, pointer, long)
    return library


def run(function, x, weight, out):
    """Compute x (rows, inputs) times weight (features, inputs) -> out (rows, features), whose rows may be apart."""
    function(
        *(x.data_ptr(), x.stride(0), *x.shape),
        *(weight.data_ptr(), weight.stride(0), len(weight)),
        *(out.data_ptr(), out.stride(0)),
    )


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 32, 33, 48, 49, 64, 100])
@pytest.mark.parametrize(("inputs", "features"), [(32, 16), (32, 17), (96, 40), (96, 63), (576, 72)])
@pytest.mark.parametrize("name", ["product", "product_of_packed"])
def test_the_product_equals_a_plain_one(library, name, rows, inputs, features):
    noise = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs + 32, generator=noise).bfloat16()[:, :inputs] for n in (rows, features))
    wide = torch.full((rows + 1, features + 3), 7.0)
    run(getattr(library, name), x, weight, wide[:rows, :features])
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(wide[:rows, :features].double(), expected, atol=1e-4, rtol=1e-5)
    assert (wide[rows:] == 7).all() and (wide[:, features:] == 7).all()  # nothing else is written


def test_an_output_depends_neither_on_rows_nor_on_the_division_of_features(library):
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 576, generator=noise).bfloat16() for n in (64, 96))
    full, parts = torch.empty(64, 96), torch.empty(64, 96)
    run(library.product, x, weight, full)
    for function in (library.product, library.product_of_packed):
        for rows in (2, 17, 33):
            run(function, x[:rows], weight[:48], parts[:rows, :48])
            run(function, x[:rows], weight[48:], parts[:rows, 48:])
            assert torch.equal(parts[:rows], full[:rows])
