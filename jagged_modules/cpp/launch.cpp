// Launches Triton's kernels for programs without Python: the operator in which traced models call
// them (jagged_kernels/precompile/traced.py, which defines its arguments). Cubins lie in the folder
// that the environment variable JAGGED_CUBINS names. CUDA's driver is loaded at the first launch,
// so that the library needs neither CUDA nor its headers.

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#ifndef LAUNCHES_ON
#define LAUNCHES_ON "CUDA"
#endif

namespace jagged_modules {
namespace {

using Int = int64_t;
using torch::stable::Tensor;

// -- CUDA's driver -------------------------------------------------------------------------------

constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;  // CUfunction_attribute
constexpr int STATIC_LIMIT = 48 << 10;            // more shared memory must be asked for

struct Driver {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  int (*cuGetErrorString)(int, const char**) = find("cuGetErrorString");
  int (*cuCtxGetCurrent)(void**) = find("cuCtxGetCurrent");
  int (*cuCtxSetCurrent)(void*) = find("cuCtxSetCurrent");
  int (*cuDevicePrimaryCtxRetain)(void**, int) = find("cuDevicePrimaryCtxRetain");
  int (*cuModuleLoadData)(void**, const void*) = find("cuModuleLoadData");
  int (*cuModuleGetFunction)(void**, void*, const char*) = find("cuModuleGetFunction");
  int (*cuFuncSetAttribute)(void*, int, int) = find("cuFuncSetAttribute");
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        void*, void**, void**) = find("cuLaunchKernel");

  struct Symbol {
    void* address;
    template <class F>
    operator F*() const { return reinterpret_cast<F*>(address); }
  };
  Symbol find(const char* name) const {
    STD_TORCH_CHECK(library, "launch: needs CUDA's driver, ", dlerror());
    void* address = dlsym(library, name);
    STD_TORCH_CHECK(address, "launch: CUDA's driver has no ", name);
    return {address};
  }
  void check(int status, const std::string& kernel) const {
    const char* text = "unknown error";
    if (status) cuGetErrorString(status, &text);
    STD_TORCH_CHECK(!status, "launch: ", kernel, ": ", text);
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// The current stream of torch. libtorch_cuda is there where tensors on CUDA are.
void* stream_of(const Tensor& x) {
  using Function = int (*)(int32_t, void**);
  static void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  static const auto current =
      library ? Function(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  void* stream = nullptr;
  if (x.is_cuda())
    STD_TORCH_CHECK(current && !current(x.get_device_index(), &stream), "launch: no CUDA stream");
  return stream;
}

// -- kernels -------------------------------------------------------------------------------------

struct Kernel {
  std::string file, name, parameters;
  unsigned threads, shared;
  void* function;
};

std::string cubin(const std::string& file) {
  const char* folder = std::getenv("JAGGED_CUBINS");
  STD_TORCH_CHECK(folder, "launch: JAGGED_CUBINS must be the folder of ", file, ", is not set");
  std::ifstream stream(std::string(folder) + "/" + file, std::ios::binary);
  STD_TORCH_CHECK(stream, "launch: JAGGED_CUBINS must be the folder of ", file, ", got ", folder);
  return {std::istreambuf_iterator<char>(stream), {}};
}

Kernel load(const std::string& description) {
  Kernel x{};
  std::istringstream words(description);
  words >> x.file >> x.name >> x.threads >> x.shared >> x.parameters;
  STD_TORCH_CHECK(words, "launch: no description of a kernel: ", description);
  const Driver& cuda = driver();
  void* loaded;
  cuda.check(cuda.cuModuleLoadData(&loaded, cubin(x.file).data()), x.file);
  cuda.check(cuda.cuModuleGetFunction(&x.function, loaded, x.name.c_str()), x.file);
  if (x.shared > STATIC_LIMIT)
    cuda.check(cuda.cuFuncSetAttribute(x.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, x.shared),
               x.file);
  return x;
}

// A module belongs to the context of a device.
const Kernel& kernel_of(int device, const std::string& description) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, Kernel> kernels;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(device, description);
  if (!kernels.count(key)) kernels[key] = load(description);
  return kernels[key];
}

// torch's context, which a new thread does not have
void enter_context(int device) {
  void* context;
  const Driver& cuda = driver();
  cuda.check(cuda.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  if (context) return;
  cuda.check(cuda.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  cuda.check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

// -- the operator --------------------------------------------------------------------------------

// The value of a kernel's parameter.
union Parameter {
  void* pointer;
  int64_t i64;
  int32_t i32;
  float f32;
};

void* address_of(const Tensor& x, const Tensor& first, bool aligned, const Kernel& kernel) {
  const bool together =
      x.is_cuda() == first.is_cuda() && x.get_device_index() == first.get_device_index();
  STD_TORCH_CHECK(together, "launch: ", kernel.name, " needs all tensors on one device");
  void* address = x.data_ptr();
  const bool fits = !aligned || reinterpret_cast<uintptr_t>(address) % 16 == 0;
  STD_TORCH_CHECK(fits, "launch: ", kernel.name, " needs tensors that begin at a multiple of 16",
                  " bytes, got ", address);
  return address;
}

int32_t narrow(Int x, const Kernel& kernel) {
  STD_TORCH_CHECK(x >= std::numeric_limits<int32_t>::min() &&
                      x <= std::numeric_limits<int32_t>::max(),
                  "launch: ", kernel.name, " takes integers of 32 bits, got ", x);
  return int32_t(x);
}

void launch(std::string description, std::vector<Tensor> written, std::vector<Tensor> read,
            std::vector<Int> integers, std::vector<double> factors, std::vector<Int> grid) {
  if (!grid.at(0) || !grid.at(1) || !grid.at(2)) return;
  const Tensor& first = written.at(0);
  const int device = first.is_cuda() ? first.get_device_index() : 0;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (first.is_cuda()) guard.emplace(device);
  enter_context(device);
  const Kernel& kernel = kernel_of(device, description);
  std::vector<Parameter> values;
  size_t w = 0, r = 0, i = 0, f = 0;
  for (const char letter : kernel.parameters) {
    Parameter& x = values.emplace_back(Parameter{nullptr});
    switch (letter) {
      case 'w': case 'W':
        x.pointer = address_of(written.at(w++), first, letter == 'W', kernel);
        break;
      case 'r': case 'R':
        x.pointer = address_of(read.at(r++), first, letter == 'R', kernel);
        break;
      case 'i': x.i32 = narrow(integers.at(i++), kernel); break;
      case 'l': x.i64 = integers.at(i++); break;
      case 'f': x.f32 = float(factors.at(f++)); break;
      default: STD_TORCH_CHECK(false, "launch: a newer jagged_modules made this model, recompile");
    }
  }
  values.resize(values.size() + 2, Parameter{nullptr});  // memory that these kernels do not use
  std::vector<void*> parameters;
  for (Parameter& x : values) parameters.push_back(&x);
  const Driver& cuda = driver();
  cuda.check(cuda.cuLaunchKernel(kernel.function, grid[0], grid[1], grid[2], kernel.threads, 1, 1,
                                 kernel.shared, stream_of(first), parameters.data(), nullptr),
             kernel.name);
}

constexpr const char* SCHEMA =
    "launch(str kernel, Tensor(a!)[] written, Tensor[] read, SymInt[] integers, float[] factors,"
    " SymInt[] grid) -> ()";

// Where Python traces models, it has defined the operator, without a kernel.
const bool registered = [] {
  TorchLibraryHandle schemas, kernels;
  aoti_torch_library_init_fragment("jagged_kernels", __FILE__, __LINE__, &schemas);
  aoti_torch_library_init_impl("jagged_kernels", LAUNCHES_ON, __FILE__, __LINE__, &kernels);
  aoti_torch_library_def(schemas, SCHEMA);
  return !torch_library_impl(kernels, "launch", TORCH_BOX(&launch), TORCH_ABI_VERSION);
}();

}  // namespace
}  // namespace jagged_modules
