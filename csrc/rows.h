// SPDX-License-Identifier: Apache-2.0
// What the kernels on both devices do to the rows of one step at one site:
//
//     out[i] = stream[i] + table[slots[i]]          if there is a table
//     arena[dest[i]] = out[i], or addend[i] + out[i]  if there is an arena and dest[i] >= 0
//
// Without a table, stream[i] stands for out[i]. Sums are rounded to T one by one, as torch rounds
// them, so that every element has the bits that torch's ops give it.
#pragma once

#include <cstdint>

template <class T>
struct Rows {
  int64_t tokens;
  int64_t hidden;
  const T* stream;
  int64_t stream_stride;
  const T* addend;  // may be null
  int64_t addend_stride;
  const T* table;  // may be null
  int64_t table_stride;
  const int32_t* slots;
  T* out;  // [tokens, hidden], contiguous
  T* arena;  // may be null
  int64_t arena_stride;
  const int32_t* dest;
};

template <class T>
void run_on_cpu(const Rows<T>& rows);

// Defined where the library is built with CUDA (WITH_CUDA).
template <class T>
void run_on_cuda(const Rows<T>& rows, int32_t device);
