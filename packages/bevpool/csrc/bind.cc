// SPDX-License-Identifier: Apache-2.0
// FFI exports that every family has. The operators' own are in <stem>_bind.cc.
#include "muspace/ffi.h"

namespace muspace::bevpool {
namespace {

tvm::ffi::String abi_info() { return ffi::abi_text("bevpool"); }

}  // namespace
}  // namespace muspace::bevpool

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_info, muspace::bevpool::abi_info)
MSP_EXPORT_SANITIZER_PROBE();
