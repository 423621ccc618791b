// In place of CUDA's driver: writes down what it is asked to do, in the file that DRIVER_RECORD
// names. A cubin is a text, the sizes of the parameters of its kernel in bytes.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace {

struct Function {
  std::string name, sizes;
};

template <class... A>
void record(const char* format, A... values) {
  FILE* file = std::fopen(std::getenv("DRIVER_RECORD"), "a");
  std::fprintf(file, format, values...);
  std::fclose(file);
}

}  // namespace

extern "C" {

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned num_attributes;
};

int cuGetErrorString(int status, const char** text) {
  *text = status == 209 ? "no kernel image is available" : "another error";
  return 0;
}
int cuCtxGetCurrent(void** context) { return *context = nullptr, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGet(int* device, int number) { return *device = number, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = context, 0; }
int cuPointerGetAttribute(void* found, int, uint64_t pointer) {
  *static_cast<uint64_t*>(found) = pointer;
  return 0;
}
int cuModuleLoadData(void** module, const void* data) {
  *module = new std::string(static_cast<const char*>(data));
  return std::string(static_cast<const char*>(data)) == "of another GPU" ? 209 : 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = new Function{name, *static_cast<std::string*>(module)};
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  const Function& asked = *static_cast<Function*>(function);
  record("%s attribute %d = %d\n", asked.name.c_str(), attribute, value);
  return 0;
}
int cuLaunchKernelEx(const Config* x, void* function, void** parameters, void**) {
  const Function& called = *static_cast<Function*>(function);
  std::string bytes;
  std::istringstream sizes(called.sizes);
  for (int size; sizes >> size; ++parameters) {
    bytes += ' ';
    for (int i = 0; i < size; ++i) {
      char digits[3];
      std::snprintf(digits, 3, "%02x", static_cast<uint8_t*>(*parameters)[i]);
      bytes += digits;
    }
  }
  record("%s %u %u %u %u %u %u %u%s\n", called.name.c_str(), x->grid[0], x->grid[1], x->grid[2],
         x->block[0], x->block[1], x->block[2], x->shared, bytes.c_str());
  return 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b,
                   unsigned c, unsigned shared, void* stream, void** parameters, void** extra) {
  const Config config{{x, y, z}, {a, b, c}, shared, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}

}  // extern "C"
