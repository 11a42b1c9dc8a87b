// Collectives among tensors of fake devices, by gloo on the same bytes, and the device's functions for Python.
#include "device.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace fake {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Accepts tensors of the device only, as the collectives of a real device do.
struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit Collectives(c10::intrusive_ptr<c10d::Backend> b) : Backend(b->getRank(), b->getSize()), gloo(std::move(b)) {}
  const std::string getBackendName() const override { return "fakeccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  static at::Tensor seen(const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == KIND, "fakeccl was given a tensor on ", t.device());
    return host(t);
  }
  static Tensors seen(const Tensors& ts) {
    Tensors out;
    for (auto& t : ts) out.push_back(seen(t));
    return out;
  }
  static std::vector<Tensors> seen(const std::vector<Tensors>& lists) {
    std::vector<Tensors> out;
    for (auto& ts : lists) out.push_back(seen(ts));
    return out;
  }
  // gloo cannot take several tensors at once: run one after another
  template <class One>
  static Work each(size_t count, One one) {
    Work last;
    for (size_t i = 0; i < count; ++i) {
      if (last) last->wait();
      last = one(i);
    }
    return last;
  }

  Work broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    auto x = seen(t);
    return gloo->broadcast(x, o);
  }
  Work allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto x = seen(t);
    return gloo->allreduce(x, o);
  }
  Work allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    c10d::AllreduceOptions plain;
    plain.reduceOp = o.reduceOp;
    return each(t.size(), [&](size_t i) {
      Tensors one{t[i]};
      return allreduce(one, plain);
    });
  }
  Work reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    auto x = seen(t);
    return gloo->reduce(x, o);
  }
  Work allgather(std::vector<Tensors>& out, Tensors& t, const c10d::AllgatherOptions& o) override {
    auto to = seen(out);
    auto x = seen(t);
    return gloo->allgather(to, x, o);
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& t, const c10d::AllgatherOptions& o) override {
    auto to = seen(out), x = seen(t);
    return gloo->_allgather_base(to, x, o);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& t, const c10d::AllgatherOptions& o) override {
    return each(t.size(), [&](size_t i) { return _allgather_base(out[i], t[i], o); });
  }
  Work gather(std::vector<Tensors>& out, Tensors& t, const c10d::GatherOptions& o) override {
    auto to = seen(out);
    auto x = seen(t);
    return gloo->gather(to, x, o);
  }
  Work scatter(Tensors& out, std::vector<Tensors>& t, const c10d::ScatterOptions& o) override {
    auto to = seen(out);
    auto x = seen(t);
    return gloo->scatter(to, x, o);
  }
  Work reduce_scatter(Tensors& out, std::vector<Tensors>& t, const c10d::ReduceScatterOptions& o) override {
    auto to = seen(out);
    auto x = seen(t);
    return gloo->reduce_scatter(to, x, o);
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& t, const c10d::ReduceScatterOptions& o) override {
    auto to = seen(out), x = seen(t);
    return gloo->_reduce_scatter_base(to, x, o);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& t, const c10d::ReduceScatterOptions& o) override {
    return each(t.size(), [&](size_t i) { return _reduce_scatter_base(out[i], t[i], o); });
  }
  Work alltoall_base(
      at::Tensor& out, at::Tensor& t, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& o) override {
    auto to = seen(out), x = seen(t);
    return gloo->alltoall_base(to, x, to_sizes, from_sizes, o);
  }
  Work alltoall(Tensors& out, Tensors& t, const c10d::AllToAllOptions& o) override {
    auto to = seen(out), x = seen(t);
    return gloo->alltoall(to, x, o);
  }
  Work send(Tensors& t, int to, int tag) override {
    auto x = seen(t);
    return gloo->send(x, to, tag);
  }
  Work recv(Tensors& t, int from, int tag) override {
    auto x = seen(t);
    return gloo->recv(x, from, tag);
  }
  Work recvAnysource(Tensors& t, int tag) override {
    auto x = seen(t);
    return gloo->recvAnysource(x, tag);
  }
  Work barrier(const c10d::BarrierOptions&) override { return gloo->barrier(c10d::BarrierOptions()); }
};

}  // namespace
}  // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", [] { return int(fake::device_count()); });
  m.def("current_device", [] { return int(fake::current_device()); });
  m.def("set_device", [](int i) { fake::set_device(c10::DeviceIndex(i)); });
  m.def("is_initialized", &fake::initialized);
  m.def("is_in_bad_fork", &fake::in_bad_fork);
  m.def("init", &fake::initialize);
  m.def("default_generator", [](int i) { return fake::default_generator(c10::DeviceIndex(i)); });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<fake::Collectives>(std::move(gloo));
  });
}
