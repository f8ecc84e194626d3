/* meter.h - a GPU's clock and power while something runs on it, as its driver tells them (NVML). */
#ifndef OPROJ_BENCH_METER_H
#define OPROJ_BENCH_METER_H

typedef struct meter meter;

/* NULL where the driver's library cannot be had: then nothing is known, which is no error. */
meter *meter_open(const char *pci_bus_id);
void meter_close(meter *m); /* NULL is allowed, here and below */

/* The clock of the multiprocessors in MHz now, and the power in W, which the driver averages over
 * about the last second; 0 where unknown. */
void meter_read(const meter *m, double *sm_mhz, double *watts);

#endif /* OPROJ_BENCH_METER_H */
