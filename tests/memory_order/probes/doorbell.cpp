// Both sides of a doorbell.
#include "doorbell.h"

using moe::emulation::Doorbell;

extern "C" {

void ring(Doorbell* bell) { bell->Ring(1); }
void sleep_until(Doorbell* bell, uint64_t wanted) { bell->SleepUntil(wanted); }
}
