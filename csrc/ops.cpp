// SPDX-License-Identifier: Apache-2.0
// The ops of namespace `pilot`, on torch's stable ABI: checks arguments, picks type and device.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <optional>

#include "rows.h"
#include "shim.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// [tokens, hidden] with the columns side by side; only `stream` and `addend` may need a copy.
Tensor with_dense_rows(const Tensor& t) {
  return t.stride(1) == 1 ? t : torch::stable::contiguous(t);
}

void check_matrix(const Tensor& t, const Tensor& stream, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) == stream.size(1), name, ": not [rows, hidden]");
  STD_TORCH_CHECK(t.scalar_type() == stream.scalar_type(), name, ": not of the stream's dtype");
  STD_TORCH_CHECK(t.device() == stream.device(), name, ": not on the stream's device");
}

void check_index(const Tensor& t, const Tensor& stream, const char* name) {
  STD_TORCH_CHECK(
      t.dim() == 1 && t.stride(0) == 1 && t.size(0) >= stream.size(0) &&
          t.scalar_type() == ScalarType::Int && t.device() == stream.device(),
      name, ": not an int32 vector of at least as many tokens as the stream, on its device");
}

// What one call is about; an op leaves out what it does not use.
struct Call {
  const Tensor& stream;
  const Tensor* addend = nullptr;
  const Tensor* table = nullptr;
  const Tensor* slots = nullptr;
  const Tensor* out = nullptr;
  const Tensor* arena = nullptr;
  const Tensor* dest = nullptr;
};

void check(const Call& call) {
  STD_TORCH_CHECK(call.stream.dim() == 2, "stream: not [tokens, hidden]");
  if (call.addend) {
    check_matrix(*call.addend, call.stream, "addend");
    STD_TORCH_CHECK(call.addend->size(0) == call.stream.size(0), "addend: not the stream's tokens");
  }
  if (call.table) {
    check_matrix(*call.table, call.stream, "table");
    STD_TORCH_CHECK(call.table->stride(1) == 1, "table: rows are not dense");
    check_index(*call.slots, call.stream, "slots");
  }
  if (call.arena) {
    check_matrix(*call.arena, call.stream, "arena");
    STD_TORCH_CHECK(call.arena->stride(1) == 1, "arena: rows are not dense");
    check_index(*call.dest, call.stream, "dest");
  }
}

template <class T>
void run_typed(const Call& call) {
  Rows<T> rows{};
  rows.tokens = call.stream.size(0);
  rows.hidden = call.stream.size(1);
  rows.stream = static_cast<const T*>(call.stream.const_data_ptr());
  rows.stream_stride = call.stream.stride(0);
  if (call.addend) {
    rows.addend = static_cast<const T*>(call.addend->const_data_ptr());
    rows.addend_stride = call.addend->stride(0);
  }
  if (call.table) {
    rows.table = static_cast<const T*>(call.table->const_data_ptr());
    rows.table_stride = call.table->stride(0);
    rows.slots = static_cast<const int32_t*>(call.slots->const_data_ptr());
    rows.out = static_cast<T*>(call.out->mutable_data_ptr());
  }
  if (call.arena) {
    rows.arena = static_cast<T*>(call.arena->mutable_data_ptr());
    rows.arena_stride = call.arena->stride(0);
    rows.dest = static_cast<const int32_t*>(call.dest->const_data_ptr());
  }
  if (rows.tokens == 0) {
    return;
  }
#ifdef WITH_CUDA
  if (call.stream.is_cuda()) {
    run_on_cuda(rows, call.stream.get_device_index());
    return;
  }
#endif
  run_on_cpu(rows);
}

void run(const Call& call) {
  switch (call.stream.scalar_type()) {
    case ScalarType::Float:
      return run_typed<float>(call);
    case ScalarType::BFloat16:
      return run_typed<torch::headeronly::BFloat16>(call);
    case ScalarType::Half:
      return run_typed<torch::headeronly::Half>(call);
    default:
      STD_TORCH_CHECK(false, "stream: neither float32, bfloat16 nor float16");
  }
}

// Straight through the C shim: torch::stable::empty_like would look the op up by name every time.
Tensor empty_rows(const Tensor& like) {
  const int64_t sizes[] = {like.size(0), like.size(1)};
  const int64_t strides[] = {like.size(1), 1};
  int32_t dtype, device_type;
  must(aoti_torch_get_dtype(like.get(), &dtype));
  must(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  must(aoti_torch_empty_strided(
      2, sizes, strides, dtype, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

std::optional<Tensor> with_dense_rows(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(with_dense_rows(*t)) : std::nullopt;
}

void capture_rows(Tensor stream, std::optional<Tensor> addend, Tensor arena, Tensor dest) {
  const Call asked{stream, addend ? &*addend : nullptr, nullptr, nullptr, nullptr, &arena, &dest};
  check(asked);
  const Tensor dense = with_dense_rows(stream);
  const std::optional<Tensor> other = with_dense_rows(addend);
  run({dense, other ? &*other : nullptr, nullptr, nullptr, nullptr, &arena, &dest});
}

Tensor add_rows(Tensor stream, Tensor table, Tensor slots) {
  check({stream, nullptr, &table, &slots});
  const Tensor dense = with_dense_rows(stream);
  Tensor out = empty_rows(stream);
  run({dense, nullptr, &table, &slots, &out});
  return out;
}

Tensor add_and_capture_rows(
    Tensor stream,
    std::optional<Tensor> addend,
    Tensor table,
    Tensor slots,
    Tensor arena,
    Tensor dest) {
  check({stream, addend ? &*addend : nullptr, &table, &slots, nullptr, &arena, &dest});
  const Tensor dense = with_dense_rows(stream);
  const std::optional<Tensor> other = with_dense_rows(addend);
  Tensor out = empty_rows(stream);
  run({dense, other ? &*other : nullptr, &table, &slots, &out, &arena, &dest});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(pilot, m) {
  m.def("capture_rows(Tensor stream, Tensor? addend, Tensor(a!) arena, Tensor dest) -> ()");
  m.def("add_rows(Tensor stream, Tensor table, Tensor slots) -> Tensor");
  m.def(
      "add_and_capture_rows(Tensor stream, Tensor? addend, Tensor table, Tensor slots, "
      "Tensor(a!) arena, Tensor dest) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pilot, CPU, m) {
  m.impl("capture_rows", TORCH_BOX(&capture_rows));
  m.impl("add_rows", TORCH_BOX(&add_rows));
  m.impl("add_and_capture_rows", TORCH_BOX(&add_and_capture_rows));
}

#ifdef WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pilot, CUDA, m) {
  m.impl("capture_rows", TORCH_BOX(&capture_rows));
  m.impl("add_rows", TORCH_BOX(&add_rows));
  m.impl("add_and_capture_rows", TORCH_BOX(&add_and_capture_rows));
}
#endif
