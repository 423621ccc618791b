// Serves a package of AOTInductor over TCP, without Python.
//
//   server model.pt2 PORT libjagged_modules.so
//   LD_PRELOAD=./libjagged_modules.so server model.pt2 PORT
//
// A message is its length in 8 bytes, little-endian, and what torch.save writes of a list of
// tensors: the inputs of the model as export_model.py orders them. The answer is such a message of
// a tuple of its outputs, or of a string that says what is wrong. Connections are served side by
// side, one request of a connection after the other.

#include <ATen/core/ivalue.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

// Of torch/csrc/jit/serialization/pickle.h, which includes so much that the server would take g++
// twice as long.
namespace torch::jit {
std::vector<char> pickle_save(const at::IValue& value);
at::IValue pickle_load(const std::vector<char>& data);
}  // namespace torch::jit

namespace {

constexpr uint64_t LONGEST = 1 << 28;  // bytes of a message
constexpr int RUNNERS = 4;             // requests that are computed at the same time

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// False at the end of the connection.
bool receive(int connection, void* to, size_t size) {
  return size == 0 || recv(connection, to, size, MSG_WAITALL) == ssize_t(size);
}

bool answer(int connection, const std::vector<char>& message) {
  const uint64_t size = message.size();
  const auto length = reinterpret_cast<const char*>(&size);
  std::vector<char> bytes(length, length + sizeof(size));
  bytes.insert(bytes.end(), message.begin(), message.end());
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t more = send(connection, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (more <= 0) return false;
    sent += more;
  }
  return true;
}

std::vector<char> outputs_of(torch::inductor::AOTIModelPackageLoader& model,
                             const std::vector<char>& message) {
  try {
    static const at::Device device(model.get_metadata().at("AOTI_DEVICE_KEY"));
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& x : torch::jit::pickle_load(message).toList().vec())
      inputs.push_back(x.toTensor().to(device));
    auto outputs = model.run(inputs);
    for (at::Tensor& x : outputs) x = x.cpu();
    return torch::jit::pickle_save(
        c10::ivalue::Tuple::create(std::vector<c10::IValue>(outputs.begin(), outputs.end())));
  } catch (const c10::Error& error) {
    return torch::jit::pickle_save(std::string(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return torch::jit::pickle_save(std::string(error.what()));
  }
}

void serve(torch::inductor::AOTIModelPackageLoader& model, int connection) {
  uint64_t size;
  while (receive(connection, &size, sizeof(size)) && size <= LONGEST) {
    std::vector<char> message(size);
    if (!receive(connection, message.data(), size)) break;
    if (!answer(connection, outputs_of(model, message))) break;
  }
  close(connection);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3 && count != 4) fail("server model.pt2 PORT [libjagged_modules.so]");
  if (count == 4 && !dlopen(arguments[3], RTLD_NOW)) fail(dlerror());
  torch::inductor::AOTIModelPackageLoader model(arguments[1], "model", false, RUNNERS);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(std::atoi(arguments[2]));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const auto where = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, where, size) || listen(listener, 64) || getsockname(listener, where, &size))
    fail("cannot listen at port " + std::string(arguments[2]));
  std::printf("port %d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  for (int connection; (connection = accept(listener, nullptr, nullptr)) >= 0;)
    std::thread(serve, std::ref(model), connection).detach();
  fail("accept failed");
}
