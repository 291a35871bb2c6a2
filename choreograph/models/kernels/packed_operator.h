// Registers a kernel over packed weights as an operator, through PyTorch's stable ABI. A decode step calls such operators
// more than a hundred times, and a call through Python takes as long as the fastest products.
//
// KERNEL and OPERATOR, the name of the operator without its namespace, are defined by the including file. The gated
// product's operator has the suffix "_gated".

#include <optional>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace {

using torch::stable::Tensor;

template <bool GATED>
Tensor run(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features) {
  Tensor x = input.is_contiguous() ? input : torch::stable::contiguous(input);
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < x.dim(); i++) shape.push_back(x.size(i));
  int64_t width = shape.back();
  shape.back() = features;
  Tensor out = torch::stable::new_empty(x, shape);
  auto pointer = [](const Tensor& tensor) { return reinterpret_cast<bf16*>(tensor.data_ptr()); };
  KERNEL(pointer(x), x.numel() / width, width, reinterpret_cast<const Packed*>(packed.data_ptr()),
         bias ? pointer(*bias) : nullptr, pointer(out), features, torch::stable::get_num_threads(), GATED);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(choreograph, CPU, library) {
  library.impl(OPERATOR, TORCH_BOX(&run<false>));
  library.impl(OPERATOR "_gated", TORCH_BOX(&run<true>));
}
