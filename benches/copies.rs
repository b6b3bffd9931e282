//! Copies of hidden states between host and GPU: plain copies, and pinned buffers as in a run.
//!
//! `cargo bench --bench dispatch -- --copies --device cuda:0 --mb 512 --steps 10` prints one line of JSON: GB/s of both
//! methods in each direction, measured in turns. On a CPU the values are null.

use crate::{
    machine::{Failed, Outcome},
    sampled::{Options, Sampled, wait_for},
};
use draftmill::engines::transfer::self_tested;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let mut given = Options::read(arguments)?;
    let (device, megabytes, steps) = (given.device()?, given.number("mb", 512)?, given.number("steps", 10)?);
    given.done()?;
    let mut line = json!({ "to_host": null, "to_host_plain": null, "to_gpu": null, "to_gpu_plain": null });
    if let Some(mut ferry) = self_tested(device).failed("send bits to and fro")? {
        let here = Tensor::f_ones([megabytes as i64 * 1_000_000], (Kind::Uint8, Device::Cpu)).failed("take memory")?;
        let there = here.f_to_device(device).failed("copy")?;
        let mut sides = [(); 4].map(|()| Sampled::begin(device)).into_iter().collect::<Outcome<Vec<_>>>()?;
        for _ in 0..=steps {
            wait_for(device);
            sides[0].step(|| ferry.to_host(&there).failed("copy to the host").map(drop))?;
            sides[1].step(|| there.f_to_device(Device::Cpu).failed("copy to the host").map(drop))?;
            sides[2].step(|| {
                let arrival = ferry.to_gpu(&here).failed("send to the GPU")?;
                arrival.into_tensor().failed("take on the GPU").map(drop)
            })?;
            sides[3].step(|| here.f_to_device(device).failed("copy to the GPU").map(drop))?;
        }
        for (name, side) in ["to_host", "to_host_plain", "to_gpu", "to_gpu_plain"].into_iter().zip(sides) {
            let seconds = side.json()?["seconds"].as_f64().unwrap_or(f64::NAN);
            line[name] = Value::from(megabytes as f64 / 1e3 / seconds);
        }
    }
    println!("{line}");
    Ok(())
}
