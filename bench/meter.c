/* meter.c - see meter.h.  The driver's library is opened at run time: machines without a GPU lack
 * it, and its header does not come with every toolkit. */
#include "meter.h"

#include <dlfcn.h>
#include <stdlib.h>

enum { SM_CLOCK = 1 }; /* NVML_CLOCK_SM */

typedef struct nvml_device *nvml_device;

struct meter {
  void *library;
  int (*shutdown)(void);
  int (*clock)(nvml_device, int type, unsigned *mhz);
  int (*power)(nvml_device, unsigned *milliwatts);
  nvml_device device;
};

/* ISO C has no cast between data and function pointers. */
static int find(const meter *m, const char *name, void *function) {
  return (*(void **)function = dlsym(m->library, name)) != NULL;
}

static int open_device(meter *m, const char *pci_bus_id) {
  int (*begin)(void) = NULL, (*device)(const char *, nvml_device *) = NULL;
  if (!find(m, "nvmlInit_v2", &begin) || !find(m, "nvmlDeviceGetHandleByPciBusId_v2", &device) ||
      !find(m, "nvmlDeviceGetClockInfo", &m->clock) ||
      !find(m, "nvmlDeviceGetPowerUsage", &m->power))
    return 0;
  if (begin() != 0) return 0;
  find(m, "nvmlShutdown", &m->shutdown);
  return device(pci_bus_id, &m->device) == 0;
}

meter *meter_open(const char *pci_bus_id) {
  meter *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  m->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (m->library && open_device(m, pci_bus_id)) return m;
  meter_close(m);
  return NULL;
}

void meter_close(meter *m) {
  if (!m) return;
  if (m->shutdown) m->shutdown();
  if (m->library) dlclose(m->library);
  free(m);
}

void meter_read(const meter *m, double *sm_mhz, double *watts) {
  unsigned mhz = 0, milliwatts = 0;
  *sm_mhz = m && m->clock(m->device, SM_CLOCK, &mhz) == 0 ? mhz : 0.0;
  *watts = m && m->power(m->device, &milliwatts) == 0 ? milliwatts * 1e-3 : 0.0;
}
