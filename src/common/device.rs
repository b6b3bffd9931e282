//! Devices on which models run, by the names of the configuration: `cpu`, `cuda` or `cuda:N`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr};

/// The device of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    Cpu,
    /// CUDA device by index.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let index = match text {
            "cpu" => return Ok(Device::Cpu),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
        };
        index
            .map(Device::Cuda)
            .ok_or_else(|| format!("`{text}` is no device; write `cpu`, `cuda` or `cuda:N` with N from 0"))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Device {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(feature = "torch")]
impl From<Device> for tch::Device {
    fn from(device: Device) -> tch::Device {
        match device {
            Device::Cpu => tch::Device::Cpu,
            Device::Cuda(index) => tch::Device::Cuda(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_and_its_device_are_one(index in 0usize..64) {
            prop_assert_eq!(Device::Cuda(index).to_string().parse(), Ok(Device::Cuda(index)));
        }
    }

    #[test]
    fn other_names_are_refused() {
        assert_eq!(["cpu", "cuda"].map(str::parse), [Ok(Device::Cpu), Ok(Device::Cuda(0))]);
        for name in ["gpu", "cuda:", "cuda:x", "cuda:-1", ""] {
            assert!(name.parse::<Device>().unwrap_err().contains(&format!("`{name}`")));
        }
    }
}
